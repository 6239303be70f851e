#include <cstring>
#include <limits>

#include "sampling.hpp"
#include "test.hpp"

using namespace octavo;
using octavo::test::Random;

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

struct Parameters {
  double temperature;
  int32_t top_k;
  double top_p, min_p;
};

// Filters of every kind, in the order of rows.
const Parameters kKinds[] = {{0, 0, 1, 0},   {1, 0, 1, 0},    {0.8, 0, 0.95, 0}, {1, 40, 1, 0},      {1, 0, 1, 0.05},
                             {2, 7, 0.9, 0}, {1, 0, 0.5, .2}, {3, 0, 0.9999, 0}, {1e-3, 3000, 1, 0},
                             {1, 90, 0.9, 1e-3}};
constexpr size_t kRows = std::size(kKinds);

std::vector<int32_t> drawn(const char* isa, int threads, const std::vector<float>& logits, size_t vocab,
                           size_t first = 0, size_t n = kRows) {
  Context context(threads, isa);
  std::vector<double> temperature, top_p, min_p, uniform;
  std::vector<int32_t> top_k, out(n);
  for (size_t i = first; i < first + n; ++i) {
    temperature.push_back(kKinds[i].temperature);
    top_k.push_back(kKinds[i].top_k);
    top_p.push_back(kKinds[i].top_p);
    min_p.push_back(kKinds[i].min_p);
    uniform.push_back(static_cast<double>(i * 37 % 100) / 100);
  }
  const SampleRows rows{temperature.data(), top_k.data(), top_p.data(), min_p.data(), uniform.data()};
  sample(context, logits.data() + first * vocab, n, vocab, rows, out.data());
  return out;
}

std::vector<float> random_logits(size_t vocab) {
  Random random(vocab);
  std::vector<float> logits(kRows * vocab);
  for (float& x : logits) x = 3 * random.heavy();
  return logits;
}

}  // namespace

TEST(sampling_is_the_same_alone_on_any_threads_and_instruction_set) {
  for (size_t vocab : {1, 7, 8, 9, 63, 64, 65, 4096, 4097, 50000}) {
    const std::vector<float> logits = random_logits(vocab);
    const std::vector<int32_t> expected = drawn("portable", 1, logits, vocab);
    for (int32_t token : expected) CHECK(token >= 0 && static_cast<size_t>(token) < vocab);
    for (const char* isa : test::isas()) {
      CHECK(drawn(isa, 3, logits, vocab) == expected, isa << " " << vocab);
      for (size_t i = 0; i < kRows; ++i) CHECK(drawn(isa, 1, logits, vocab, i, 1)[0] == expected[i], isa << " " << i);
    }
  }
}

TEST(sampling_weights_have_the_same_bits_on_every_instruction_set) {
  const size_t n = 5003;
  const std::vector<float> x = random_logits(n);
  std::vector<float> expected(n), w(n);
  select_kernels("portable").sampling.weights(x.data(), n, 20, 1.7f, expected.data());
  const double sum = select_kernels("portable").sampling.weight_sum(x.data(), n, 20, 1.7f);
  for (const char* isa : test::isas()) {
    const SamplingKernels& kernels = select_kernels(isa).sampling;
    kernels.weights(x.data(), n, 20, 1.7f, w.data());
    CHECK(std::memcmp(w.data(), expected.data(), n * sizeof(float)) == 0, isa);
    CHECK(kernels.weight_sum(x.data(), n, 20, 1.7f) == sum, isa);
    for (size_t i = 0; i < n; ++i) {
      const double exact = std::exp2((static_cast<double>(x[i]) - 20) * static_cast<double>(1.7f));
      CHECK(std::abs(w[i] - exact) <= 1e-5 * exact, isa << " " << x[i]);
    }
  }
}

TEST(sampling_refuses_rows_that_are_not_finite) {
  const size_t vocab = 100;
  std::vector<float> logits(kRows * vocab, 0.5f);
  logits[0 * vocab + 70] = NAN;
  logits[1 * vocab + 99] = kInf;
  for (size_t i = 0; i < vocab; ++i) logits[2 * vocab + i] = logits[3 * vocab + i] = -kInf;
  logits[3 * vocab + 42] = -3;
  logits[4 * vocab + 0] = NAN;
  for (const char* isa : test::isas()) {
    const std::vector<int32_t> tokens = drawn(isa, 2, logits, vocab);
    CHECK(tokens[0] == -1 && tokens[1] == -1 && tokens[2] == -1 && tokens[3] == 42 && tokens[4] == -1, isa);
    for (size_t i = 5; i < kRows; ++i) CHECK(tokens[i] >= 0, isa);
  }
}
