// The smallest test harness that names what failed: TEST(name) { CHECK(...); }.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace octavo::test {

struct Case {
  const char* name;
  void (*body)();
};
std::vector<Case>& cases();

struct Register {
  Register(const char* name, void (*body)()) { cases().push_back({name, body}); }
};

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// How often memory was taken from the heap so far.
size_t allocations();

/// Every instruction set that runs on this machine.
std::vector<const char*> isas();

/// A small generator with the same numbers on every platform (splitmix64).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  /// Uniform in 0..n.
  size_t below(size_t n) { return static_cast<size_t>(next() % n); }
  /// Uniform in -1..1.
  float uniform() { return static_cast<float>(static_cast<double>(next() >> 11) * 0x1p-52 - 1.0); }
  /// Heavy-tailed, as activations are: a cubed uniform.
  float heavy() {
    const float u = uniform();
    return 4 * u * u * u;
  }

 private:
  uint64_t state_;
};

}  // namespace octavo::test

#define TEST(name)                                                              \
  static void test_##name();                                                    \
  static const octavo::test::Register register_##name{#name, test_##name};      \
  static void test_##name()

#define CHECK(condition, ...)                                                                   \
  do {                                                                                          \
    if (!(condition)) {                                                                         \
      std::ostringstream message_;                                                              \
      message_ << __FILE__ << ":" << __LINE__ << ": " << #condition << " " __VA_OPT__(<<) __VA_ARGS__; \
      throw octavo::test::Failure(message_.str());                                              \
    }                                                                                           \
  } while (false)
