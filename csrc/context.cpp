#include "context.hpp"

#include <algorithm>
#include <cstring>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace octavo {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kBlockBytes = size_t{32} << 20;

size_t alignment(size_t bytes) { return bytes >= kHugePage ? kHugePage : 64; }

}  // namespace

Buffer::Buffer(size_t bytes) : size_(bytes) {
  if (bytes == 0) return;
  data_ = static_cast<uint8_t*>(::operator new(bytes, std::align_val_t{alignment(bytes)}));
#if defined(MADV_HUGEPAGE)
  // The part of the last huge page that is not ours may belong to somebody else.
  if (bytes >= kHugePage) madvise(data_, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);
#endif
  std::memset(data_, 0, bytes);
}

void Buffer::release() {
  if (data_ != nullptr) ::operator delete(data_, std::align_val_t{alignment(size_)});
}

std::shared_ptr<uint8_t> WeightMemory::take(size_t bytes) {
  const size_t rounded = (bytes + 63) / 64 * 64;
  if (block_ == nullptr || rounded > block_->size() - used_) {
    // What would fill most of a block gets one of its own, and what is left of the present one stays in use.
    if (rounded > kBlockBytes / 2) {
      auto own = std::make_shared<Buffer>(rounded);
      return {own, own->data()};
    }
    block_ = std::make_shared<Buffer>(kBlockBytes);
    used_ = 0;
  }
  uint8_t* data = block_->data() + used_;
  used_ += rounded;
  return {block_, data};
}

}  // namespace octavo
