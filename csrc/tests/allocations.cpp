// Counts what the program takes from the heap.
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

#include "test.hpp"

namespace octavo::test {

static std::atomic<size_t> taken{0};

size_t allocations() { return taken.load(); }

static void* take(size_t bytes, size_t alignment) {
  taken.fetch_add(1);
  void* p = nullptr;
  if (posix_memalign(&p, alignment < sizeof(void*) ? sizeof(void*) : alignment, bytes == 0 ? 1 : bytes) != 0)
    throw std::bad_alloc();
  return p;
}

}  // namespace octavo::test

void* operator new(size_t bytes) { return octavo::test::take(bytes, alignof(std::max_align_t)); }
void* operator new(size_t bytes, std::align_val_t a) { return octavo::test::take(bytes, static_cast<size_t>(a)); }
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, size_t) noexcept { std::free(p); }
void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete(void* p, size_t, std::align_val_t) noexcept { std::free(p); }
