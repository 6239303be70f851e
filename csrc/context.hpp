// What an operation needs beside its arguments: threads, kernels, and scratch memory that is reused from call to call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "dispatch.hpp"
#include "pool.hpp"

namespace octavo {

/// Bytes at a 64-byte boundary, zero at first. Large ones lie in huge pages where the system has them: with pages of
/// 4 KiB a core reads memory little more than half as fast.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t bytes);
  ~Buffer() { release(); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  Buffer(Buffer&& o) noexcept : data_(std::exchange(o.data_, nullptr)), size_(std::exchange(o.size_, 0)) {}
  Buffer& operator=(Buffer&& o) noexcept {
    if (this != &o) {
      release();
      data_ = std::exchange(o.data_, nullptr);
      size_ = std::exchange(o.size_, 0);
    }
    return *this;
  }

  uint8_t* data() { return data_; }
  const uint8_t* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  void release();
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

/// Memory for weights, cut from blocks that are large enough for huge pages. A block goes with the last of its weights.
class WeightMemory {
 public:
  /// Zeros at a 64-byte boundary.
  std::shared_ptr<uint8_t> take(size_t bytes);

 private:
  std::shared_ptr<Buffer> block_;
  size_t used_ = 0;
};

/// Growing buffers by slot. What an operation takes is its own until it ends; contents are then arbitrary.
class Scratch {
 public:
  /// At least n values of T in slot `slot`; earlier pointers into the slot become invalid.
  template <class T>
  T* take(int slot, size_t n) {
    if (slots_.size() <= static_cast<size_t>(slot)) slots_.resize(static_cast<size_t>(slot) + 1);
    Buffer& buffer = slots_[static_cast<size_t>(slot)];
    if (buffer.size() < n * sizeof(T)) buffer = Buffer(n * sizeof(T) + n * sizeof(T) / 4 + 64);
    return reinterpret_cast<T*>(buffer.data());
  }

  size_t bytes() const {
    size_t sum = 0;
    for (const Buffer& b : slots_) sum += b.size();
    return sum;
  }

 private:
  std::vector<Buffer> slots_;
};

/// One per engine. `lock` is held for the whole of an operation, so that two Python threads cannot share scratch.
struct Context {
  Context(int threads, const char* isa) : kernels(select_kernels(isa)), pool(threads) {}

  const KernelTable& kernels;
  Pool pool;
  Scratch scratch;
  WeightMemory weights;
  std::mutex lock;
};

/// Scratch slots. Each operation uses its own; those of operations that run one after the other may be shared.
enum Slot : int {
  kSlotActivations = 0,
  kSlotHidden = 1,
  kSlotMlp = 2,
  kSlotSampling = 3,    // 3.. for sampling
  kSlotAttention = 16,  // 16.. for the attention block
};

}  // namespace octavo
