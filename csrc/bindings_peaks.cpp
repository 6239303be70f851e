// What this machine can do at most, for octavo.ops._cpu: the ceilings of a roofline.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "bindings.hpp"
#include "errors.hpp"

namespace octavo {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Reads `bytes` of memory `repeats` times on all threads; GB/s of every pass.
std::vector<double> read_bandwidth(Context& context, size_t bytes, int repeats) {
  const Buffer buffer(bytes);
  const size_t threads = static_cast<size_t>(context.pool.threads());
  const size_t share = bytes / threads / 64 * 64;
  std::vector<uint64_t> sums(threads * 8);
  std::vector<double> passes;
  for (int i = 0; i < repeats; ++i) {
    const auto start = Clock::now();
    context.pool.parallel_for(threads, [&](size_t task, int) {
      const uint8_t* p = buffer.data() + task * share;
      uint64_t sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
      for (size_t k = 0; k < share; k += 64) {
        uint64_t v[8];
        std::memcpy(v, p + k, 64);
        for (int j = 0; j < 8; ++j) sum[j] += v[j];
      }
      for (int j = 0; j < 8; ++j) sums[task * 8 + static_cast<size_t>(j)] += sum[j];
    });
    passes.push_back(static_cast<double>(share * threads) / seconds_since(start) / 1e9);
  }
  uint64_t total = 0;
  for (const uint64_t s : sums) total += s;
  if (total != 0) throw std::logic_error("the buffer of zeros is not zero");
  return passes;
}

// Multiply-adds of one kind on all threads for `rounds` rounds, `repeats` times; G operations per second of every pass,
// two per multiply-add.
std::vector<double> arithmetic(Context& context, const std::string& kind, size_t rounds, int repeats) {
  const PeakKernels& peaks = context.kernels.peaks;
  if (kind != "f32" && kind != "i16" && kind != "i8")
    throw std::invalid_argument("kind must be \"f32\", \"i16\" or \"i8\", got \"" + kind + "\"");
  size_t (*loop)(size_t) = kind == "f32" ? peaks.f32 : kind == "i16" ? peaks.i16 : peaks.i8;
  if (loop == nullptr) throw UnsupportedError("the portable path has no loop that measures arithmetic");
  const size_t threads = static_cast<size_t>(context.pool.threads());
  std::vector<double> passes;
  for (int i = 0; i < repeats; ++i) {
    std::vector<size_t> done(threads);
    const auto start = Clock::now();
    context.pool.parallel_for(threads, [&](size_t task, int) { done[task] = loop(rounds); });
    const double seconds = seconds_since(start);
    size_t sum = 0;
    for (const size_t n : done) sum += n;
    passes.push_back(2 * static_cast<double>(sum) / seconds / 1e9);
  }
  return passes;
}

}  // namespace

void bind_peaks(nb::module_& m) {
  m.def(
      "read_bandwidth",
      [](Context& c, size_t bytes, int repeats) { return run_locked(c, [&] { return read_bandwidth(c, bytes, repeats); }); },
      nb::arg("context"), nb::arg("bytes") = size_t{256} << 20, nb::arg("repeats") = 5,
      "Measured read bandwidth of all threads together, GB/s of each pass: the ceiling of a decode step.");
  m.def(
      "peak_arithmetic",
      [](Context& c, const std::string& kind, size_t rounds, int repeats) {
        return run_locked(c, [&] { return arithmetic(c, kind, rounds, repeats); });
      },
      nb::arg("context"), nb::arg("kind"), nb::arg("rounds") = size_t{2000000}, nb::arg("repeats") = 5,
      "Multiply-adds on registers, all threads together: G operations per second of each pass, two per multiply-add. "
      "kind: \"f32\", or integers with 32-bit sums, \"i16\" or \"i8\".");
}

}  // namespace octavo
