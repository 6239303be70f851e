// Linear layers, embedding, MLP and head over random shapes, in heap arrays of exact size, so that a sanitizer sees a
// read or write one element too far.
#include <algorithm>
#include <array>
#include <cstring>

#include "blocks.hpp"
#include "errors.hpp"
#include "linear.hpp"
#include "test.hpp"

using namespace octavo;
using octavo::test::Random;

namespace {

constexpr std::array kAllTypes = {TensorType::F32,  TensorType::F16,  TensorType::BF16, TensorType::Q4_0,
                                  TensorType::Q4_1, TensorType::Q5_0, TensorType::Q5_1, TensorType::Q8_0,
                                  TensorType::Q4_K, TensorType::Q5_K, TensorType::Q6_K};

size_t block_of(TensorType type) { return is_float(type) ? 1 : type >= TensorType::Q4_K ? 256 : 32; }

// Offsets of 16-bit floats in a stored block of a quantized type.
std::vector<size_t> scale_offsets(TensorType type) {
  switch (type) {
    case TensorType::Q4_1:
    case TensorType::Q5_1:
    case TensorType::Q4_K:
    case TensorType::Q5_K: return {0, 2};
    case TensorType::Q6_K: return {208};
    default: return {0};
  }
}

struct Weights {
  std::vector<uint8_t> bytes;
  TensorView view;
};

Weights random_weights(Random& random, TensorType type, size_t rows, size_t cols) {
  Weights w;
  const size_t row_bytes = stored_row_bytes(type, cols);
  w.bytes.resize(rows * row_bytes);
  for (uint8_t& b : w.bytes) b = static_cast<uint8_t>(random.next());
  const auto put = [&](size_t at, uint16_t v) { std::memcpy(w.bytes.data() + at, &v, 2); };
  if (type == TensorType::F32) {
    for (size_t i = 0; i < rows * cols; ++i) {
      const float v = random.heavy();
      std::memcpy(w.bytes.data() + 4 * i, &v, 4);
    }
  } else if (is_float(type)) {
    // Exponents near 1, random sign and mantissa.
    for (size_t i = 0; i < rows * cols; ++i) {
      const auto bits = static_cast<uint16_t>(random.next());
      put(2 * i, type == TensorType::F16 ? static_cast<uint16_t>((bits & 0x83ff) | 0x3800)
                                         : static_cast<uint16_t>((bits & 0x807f) | 0x3f00));
    }
  } else {
    const size_t bytes = stored_row_bytes(type, block_of(type));
    for (size_t at = 0; at < w.bytes.size(); at += bytes)
      for (const size_t offset : scale_offsets(type))
        put(at + offset, static_cast<uint16_t>((random.next() & 0x83ff) | 0x2800));
  }
  w.view = {"w", type, rows, cols, w.bytes.data(), w.bytes.size(), nullptr};
  return w;
}

std::vector<float> random_rows(Random& random, size_t n) {
  std::vector<float> x(n);
  for (float& v : x) v = random.heavy() * (random.below(50) == 0 ? 20.0f : 1.0f);
  return x;
}

// Row m of x as a layer over `type` reads it.
std::vector<double> as_read(Context& context, TensorType type, const float* x, size_t cols) {
  std::vector<double> y(x, x + cols);
  if (is_float(type)) return y;
  std::vector<ActGroup> groups(cols / kGroup);
  context.kernels.linear.quantize_row(x, cols, groups.data());
  for (size_t k = 0; k < cols; ++k) {
    const ActGroup& g = groups[k / kGroup];
    const size_t i = k % kGroup;
    y[k] = static_cast<double>(g.d) * g.q[(i & ~size_t{3}) | ((i & 1) << 1) | ((i & 2) >> 1)];
  }
  return y;
}

}  // namespace

TEST(linear_equals_its_oracle) {
  Random random(10);
  for (const char* isa : test::isas()) {
    Context context(2, isa);
    for (const TensorType type : kAllTypes) {
      for (int round = 0; round < 6; ++round) {
        const size_t block = block_of(type), rows = 1 + random.below(60);
        const size_t cols = block == 1 ? 1 + random.below(90) : block * (1 + random.below(block == 32 ? 8 : 3));
        const size_t n = 1 + random.below(round % 2 ? 9 : 80);
        const Weights w = random_weights(random, type, rows, cols);
        const std::vector<float> x = random_rows(random, n * cols), bias = random_rows(random, rows);
        const bool add = random.below(2) == 1;
        const Linear linear(context, std::vector{w.view}, bias);
        std::vector<float> out(n * rows, 0.5f);
        linear_forward(context, linear, linear_input(context, linear, x.data(), cols, n, nullptr), n, out.data(), rows,
                       add);
        std::vector<float> row(cols);
        for (size_t r = 0; r < rows; ++r) {
          dequantize_row(w.view, r, row.data());
          for (size_t m = 0; m < n; ++m) {
            const std::vector<double> seen = as_read(context, type, x.data() + m * cols, cols);
            double sum = bias[r] + (add ? 0.5 : 0.0), size = std::abs(sum);
            for (size_t k = 0; k < cols; ++k) sum += seen[k] * row[k], size += std::abs(seen[k] * row[k]);
            CHECK(std::abs(out[m * rows + r] - sum) <= (static_cast<double>(cols) + 6) * 0x1p-24 * size,
                  isa << " " << tensor_type_name(type) << " [" << rows << ", " << cols << "] n=" << n);
          }
        }
      }
    }
  }
}

TEST(linear_rows_do_not_depend_on_the_call) {
  Random random(11);
  for (const char* isa : test::isas()) {
    for (const TensorType type : kAllTypes) {
      const size_t cols = 256, rows = 45, n = 37;
      const Weights w = random_weights(random, type, rows, cols);
      const std::vector<float> x = random_rows(random, n * cols), norm = random_rows(random, cols);
      const Norm before{norm.data(), 1e-5f};
      std::vector<float> first;
      for (const int threads : {1, 2, 4}) {
        Context context(threads, isa);
        const Linear linear(context, std::vector{w.view});
        std::vector<float> out(n * rows), one(rows);
        linear_forward(context, linear, linear_input(context, linear, x.data(), cols, n, &before), n, out.data(), rows,
                       false);
        if (first.empty()) first = out;
        CHECK(out == first, isa << " " << tensor_type_name(type) << " threads " << threads);
        for (size_t m = 0; m < n; ++m) {
          linear_forward(context, linear, linear_input(context, linear, x.data() + m * cols, cols, 1, &before), 1,
                         one.data(), rows, false);
          CHECK(std::equal(one.begin(), one.end(), out.begin() + static_cast<ptrdiff_t>(m * rows)),
                isa << " " << tensor_type_name(type) << " row " << m);
        }
      }
    }
  }
}

TEST(linear_instruction_sets_agree_to_rounding) {
  Random random(12);
  for (const TensorType type : kAllTypes) {
    const size_t cols = 512, rows = 24, n = 5;
    const Weights w = random_weights(random, type, rows, cols);
    const std::vector<float> x = random_rows(random, n * cols);
    std::vector<float> first;
    for (const char* isa : test::isas()) {
      Context context(2, isa);
      const Linear linear(context, std::vector{w.view});
      std::vector<float> out(n * rows);
      linear_forward(context, linear, linear_input(context, linear, x.data(), cols, n, nullptr), n, out.data(), rows,
                     false);
      if (first.empty()) first = out;
      float most = 0;
      for (const float v : first) most = std::max(most, std::abs(v));
      for (size_t i = 0; i < out.size(); ++i) CHECK(std::abs(out[i] - first[i]) <= 1e-5f * most, isa);
    }
  }
}

TEST(blocks_over_random_shapes) {
  Random random(13);
  for (const char* isa : test::isas()) {
    Context context(3, isa);
    for (const TensorType type : kAllTypes) {
      for (int round = 0; round < 3; ++round) {
        const size_t block = block_of(type);
        const size_t d = block == 1 ? 1 + random.below(40) : block * (1 + random.below(2));
        const size_t width = block == 1 ? 1 + random.below(70) : block * (1 + random.below(2));
        const size_t vocab = 1 + random.below(50), n = 1 + random.below(70);
        const Weights gate = random_weights(random, type, width, d), up = random_weights(random, type, width, d);
        const Weights down = random_weights(random, type, d, width), table = random_weights(random, type, vocab, d);
        const std::vector<float> norm = random_rows(random, d);

        std::vector<int32_t> tokens(n), rows(n);
        for (int32_t& t : tokens) t = static_cast<int32_t>(random.below(vocab));
        for (int32_t& r : rows) r = static_cast<int32_t>(random.below(n));
        std::vector<float> hidden(n * d);
        Embedding(context, table.view).lookup(context, tokens.data(), n, hidden.data());
        std::vector<float> expected(d);
        dequantize_row(table.view, static_cast<size_t>(tokens[n - 1]), expected.data());
        CHECK(std::memcmp(expected.data(), hidden.data() + (n - 1) * d, d * 4) == 0);

        const Mlp mlp(context, norm, 1e-5f, gate.view, up.view, down.view);
        std::vector<float> last(hidden.end() - static_cast<ptrdiff_t>(d), hidden.end());
        mlp.run(context, hidden.data(), n);
        mlp.run(context, last.data(), 1);
        CHECK(std::memcmp(last.data(), hidden.data() + (n - 1) * d, d * 4) == 0, isa << " " << tensor_type_name(type));

        const Head head(context, norm, 1e-5f, table.view);
        std::vector<float> logits(n * vocab), one(vocab);
        head.run(context, hidden.data(), n, rows.data(), n, logits.data());
        head.run(context, hidden.data(), n, rows.data() + n - 1, 1, one.data());
        CHECK(std::memcmp(one.data(), logits.data() + (n - 1) * vocab, vocab * 4) == 0);
        log_softmax(context, logits.data(), n, vocab, logits.data());
        double sum = 0;
        for (size_t i = 0; i < vocab; ++i) sum += std::exp(static_cast<double>(logits[i]));
        CHECK(std::abs(sum - 1) < 1e-5);
      }
    }
  }
}

TEST(blocks_take_no_memory_once_they_have_run) {
  Context context(2, "auto");
  Random random(3);
  const size_t d = 64, width = 96, vocab = 40;
  const std::vector<float> norm(d, 1.0f);
  const Weights gate = random_weights(random, TensorType::Q4_0, width, d);
  const Weights up = random_weights(random, TensorType::F16, width, d);
  const Weights down = random_weights(random, TensorType::Q8_0, d, width);
  const Weights out = random_weights(random, TensorType::Q6_K, vocab, 256);
  const Mlp mlp(context, norm, 1e-5f, gate.view, up.view, down.view);
  const std::vector<float> wide(256, 1.0f);
  const Head head(context, wide, 1e-5f, out.view);
  std::vector<float> hidden(2 * 256, 0.5f), logits(vocab);
  const int32_t row = 1;
  for (int i = 0; i < 2; ++i) {
    const size_t before = test::allocations();
    mlp.run(context, hidden.data(), 2);
    head.run(context, hidden.data(), 2, &row, 1, logits.data());
    CHECK((test::allocations() == before) == (i > 0), "call " << i);
  }
}

TEST(weights_share_blocks_that_outlive_their_maker) {
  std::shared_ptr<uint8_t> a, b, large;
  {
    WeightMemory memory;
    a = memory.take(100);
    large = memory.take(size_t{40} << 20);
    b = memory.take(1000);
    CHECK(b.get() - a.get() == 128, "what is too large for a block leaves the present one in use");
    const auto c = memory.take(size_t{16} << 20), d = memory.take(size_t{16} << 20);
    CHECK(reinterpret_cast<uintptr_t>(c.get()) % 64 == 0 && reinterpret_cast<uintptr_t>(d.get()) % 64 == 0);
  }
  for (size_t i = 0; i < 100; ++i) CHECK(a.get()[i] == 0);
  std::memset(a.get(), 1, 100);
  std::memset(b.get(), 2, 1000);
  std::memset(large.get(), 3, size_t{40} << 20);
  CHECK(a.get()[99] == 1 && b.get()[999] == 2);
}

TEST(linear_refuses_damaged_weights) {
  Random random(14);
  Context context(2, "auto");
  Weights w = random_weights(random, TensorType::Q5_K, 9, 512);
  const uint16_t nan = 0x7e01;
  std::memcpy(w.bytes.data() + 8 * stored_row_bytes(TensorType::Q5_K, 512) + 176 + 2, &nan, 2);
  bool caught = false;
  try {
    const Linear linear(context, std::vector{w.view});
  } catch (const LoadError& e) {
    caught = std::string(e.what()).find("stored row 8") != std::string::npos;
  }
  CHECK(caught);
}
