#include "pool.hpp"

#include <chrono>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace octavo {
namespace {

constexpr auto kSpin = std::chrono::microseconds(50);

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits until `state` is no longer `old`: spins for a while, then sleeps until a notify.
void wait_change(const std::atomic<uint32_t>& state, uint32_t old) {
  const auto deadline = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 32; ++i) {
      if (state.load(std::memory_order_acquire) != old) return;
      relax();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  state.wait(old, std::memory_order_acquire);
}

}  // namespace

Pool::Pool(int threads) : threads_(threads) {
  if (threads < 1 || threads > kMaxThreads)
    throw std::invalid_argument("threads must be from 1 to " + std::to_string(kMaxThreads) + ", got " +
                                std::to_string(threads));
  workers_.reserve(static_cast<size_t>(threads - 1));
  for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
}

Pool::~Pool() {
  state_.fetch_or(kStop, std::memory_order_release);
  state_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void Pool::run(size_t n, Invoke invoke, void* body) {
  invoke_ = invoke;
  body_ = body;
  n_ = n;
  next_.store(0, std::memory_order_relaxed);
  failed_.store(false, std::memory_order_relaxed);
  error_ = nullptr;
  const uint32_t job = (state_.load(std::memory_order_relaxed) & ~kInside & ~kOpen) + kJob;
  state_.store(job | kOpen, std::memory_order_release);
  state_.notify_all();

  take_tasks(0);

  uint32_t state = state_.fetch_and(~kOpen, std::memory_order_acq_rel) & ~kOpen;
  while ((state & kInside) != 0) {
    wait_change(state_, state);
    state = state_.load(std::memory_order_acquire);
  }
  if (failed_.load(std::memory_order_acquire)) {
    const std::exception_ptr error = error_;
    error_ = nullptr;
    std::rethrow_exception(error);
  }
}

void Pool::take_tasks(int thread) {
  for (;;) {
    const size_t task = next_.fetch_add(1, std::memory_order_relaxed);
    if (task >= n_) return;
    try {
      invoke_(body_, task, thread);
    } catch (...) {
      next_.store(n_, std::memory_order_relaxed);
      if (!failed_.exchange(true, std::memory_order_acq_rel)) error_ = std::current_exception();
    }
  }
}

void Pool::work(int thread) {
  uint32_t done = ~0u;  // number of the last job that this worker entered
  uint32_t state = state_.load(std::memory_order_acquire);
  for (;;) {
    if ((state & kStop) != 0) return;
    const uint32_t job = state & ~(kJob - 1);
    if ((state & kOpen) == 0 || job == done) {
      wait_change(state_, state);
      state = state_.load(std::memory_order_acquire);
      continue;
    }
    if (!state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) continue;
    done = job;
    take_tasks(thread);
    const uint32_t left = state_.fetch_sub(1, std::memory_order_acq_rel) - 1;
    if ((left & (kInside | kOpen)) == 0) state_.notify_all();  // the caller may be waiting for the last one out
    state = left;
  }
}

}  // namespace octavo
