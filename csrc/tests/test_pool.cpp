#include <atomic>
#include <chrono>
#include <thread>

#include "pool.hpp"
#include "test.hpp"

using namespace octavo;

TEST(pool_runs_each_task_once) {
  for (int threads : {1, 2, 3, 8}) {
    Pool pool(threads);
    for (size_t n : {size_t{0}, size_t{1}, size_t{2}, size_t{7}, size_t{1000}}) {
      for (int repeat = 0; repeat < 200; ++repeat) {
        std::vector<std::atomic<int>> count(n);
        pool.parallel_for(n, [&](size_t i, int thread) {
          CHECK(thread >= 0 && thread < threads);
          count[i].fetch_add(1);
        });
        for (size_t i = 0; i < n; ++i) CHECK(count[i].load() == 1, "task " << i);
      }
    }
  }
}

TEST(pool_writes_are_visible_to_the_caller) {
  Pool pool(4);
  std::vector<int> values(64);
  for (int round = 1; round <= 5000; ++round) {
    pool.parallel_for(values.size(), [&](size_t i, int) { values[i] += static_cast<int>(i) + round; });
  }
  for (size_t i = 0; i < values.size(); ++i) CHECK(values[i] == 5000 * static_cast<int>(i) + 5000 * 5001 / 2);
}

TEST(pool_wakes_sleeping_workers) {
  Pool pool(3);
  for (int round = 0; round < 20; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));  // past the spin
    std::atomic<int> sum{0};
    pool.parallel_for(10, [&](size_t i, int) { sum += static_cast<int>(i); });
    CHECK(sum.load() == 45);
  }
}

TEST(pool_rethrows_and_stays_usable) {
  for (int threads : {1, 2, 4}) {
    Pool pool(threads);
    for (int round = 0; round < 100; ++round) {
      bool caught = false;
      try {
        pool.parallel_for(50, [&](size_t i, int) {
          if (i % 10 == 3) throw std::runtime_error("task failed");
        });
      } catch (const std::runtime_error& e) {
        caught = std::string(e.what()) == "task failed";
      }
      CHECK(caught);
      std::atomic<int> sum{0};
      pool.parallel_for(10, [&](size_t, int) { sum += 1; });
      CHECK(sum.load() == 10);
    }
  }
}

TEST(pool_refuses_impossible_sizes) {
  for (int threads : {0, -1, Pool::kMaxThreads + 1}) {
    bool caught = false;
    try {
      Pool pool(threads);
    } catch (const std::invalid_argument&) {
      caught = true;
    }
    CHECK(caught, threads);
  }
}
