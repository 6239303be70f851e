// A pool of threads for loops of independent tasks, cheap enough to fork in every operation.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

namespace octavo {

/// `threads` threads, the caller of parallel_for among them. Idle workers spin for tens of microseconds and then sleep.
/// One parallel_for at a time, from any one thread; tasks must not call parallel_for.
class Pool {
 public:
  static constexpr int kMaxThreads = 512;

  /// Throws std::invalid_argument unless 1 <= threads <= kMaxThreads.
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }

  /// Calls f(task, thread) once for each task in 0..n, with thread in 0..threads(), and returns when all are done. Which
  /// thread takes which task is undefined: results must not depend on it. The first exception stops tasks that have
  /// not begun and is rethrown here.
  template <class F>
  void parallel_for(size_t n, F&& f) {
    if (n == 0) return;
    if (n == 1 || threads_ == 1) {
      for (size_t i = 0; i < n; ++i) f(i, 0);
      return;
    }
    using Body = std::remove_reference_t<F>;
    run(n, [](void* body, size_t task, int thread) { (*static_cast<Body*>(body))(task, thread); },
        const_cast<void*>(static_cast<const void*>(std::addressof(f))));
  }

 private:
  using Invoke = void (*)(void* body, size_t task, int thread);

  void run(size_t n, Invoke invoke, void* body);
  void take_tasks(int thread);
  void work(int thread);

  // state_: number of the job (20 bits) | stop | open | workers inside (10 bits). Workers enter only an open job; the
  // caller closes it when no task is left and waits for those inside. So a worker that is slow to wake delays nobody.
  static constexpr uint32_t kInside = 0x3ff;
  static constexpr uint32_t kOpen = 1u << 10;
  static constexpr uint32_t kStop = 1u << 11;
  static constexpr uint32_t kJob = 1u << 12;

  const int threads_;
  Invoke invoke_ = nullptr;
  void* body_ = nullptr;
  size_t n_ = 0;
  alignas(64) std::atomic<size_t> next_{0};
  alignas(64) std::atomic<uint32_t> state_{0};
  std::atomic<bool> failed_{false};
  std::exception_ptr error_;
  std::vector<std::thread> workers_;
};

}  // namespace octavo
