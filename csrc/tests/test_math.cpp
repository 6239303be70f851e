#include <cstring>
#include <limits>

#include "dispatch.hpp"
#include "test.hpp"

using namespace octavo;
using octavo::test::Random;

namespace {
constexpr float kInf = std::numeric_limits<float>::infinity();
}

TEST(math_exp) {
  for (const char* isa : test::isas()) {
    const MathKernels& math = select_kernels(isa).math;
    std::vector<float> x, y;
    for (double v = -87.3; v < 88.3; v += 0.00137) x.push_back(static_cast<float>(v));
    y.resize(x.size());
    math.exp(x.data(), x.size(), y.data());
    double worst = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      const double exact = std::exp(static_cast<double>(x[i]));
      worst = std::max(worst, std::abs(y[i] - exact) / exact);
    }
    CHECK(worst < 3e-7, isa << " " << worst);
    const float special[] = {-kInf, -1e30f, -88.0f, 0.0f, -0.0f, 88.8f, kInf, NAN, 1.0f};
    float out[9];
    math.exp(special, 9, out);
    CHECK(out[0] == 0 && out[1] == 0 && out[2] == 0 && !std::signbit(out[0]));
    CHECK(out[3] == 1 && out[4] == 1 && out[5] == kInf && out[6] == kInf && std::isnan(out[7]));
  }
}

TEST(math_exp2_down) {
  for (const char* isa : test::isas()) {
    const MathKernels& math = select_kernels(isa).math;
    std::vector<float> x;
    for (double v = -125.4; v <= 0; v += 0.00137) x.push_back(static_cast<float>(v));
    std::vector<float> y(x.size());
    math.exp2_down(x.data(), x.size(), y.data());
    double worst = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      const double exact = std::exp2(static_cast<double>(x[i]));
      worst = std::max(worst, std::abs(y[i] - exact) / exact);
    }
    CHECK(worst < 3e-7, isa << " " << worst);
    const float special[] = {0.0f, -0.0f, -1.0f, -126.0f, -1e30f, -kInf, NAN, -NAN};
    float out[8];
    math.exp2_down(special, 8, out);
    CHECK(out[0] == 1 && out[1] == 1 && out[2] == 0.5f && std::isnan(out[6]) && std::isnan(out[7]), isa);
    for (int i = 3; i < 6; ++i) CHECK(out[i] == 0x1p-126f, isa << " " << out[i]);
  }
}

TEST(math_exp_is_the_same_in_every_lane) {
  for (const char* isa : test::isas()) {
    const MathKernels& math = select_kernels(isa).math;
    Random random(1);
    for (int round = 0; round < 200; ++round) {
      const float v = 40 * random.uniform();
      std::vector<float> x(19, v), y(19);
      math.exp(x.data(), x.size(), y.data());
      for (float f : y) CHECK(std::memcmp(&f, y.data(), 4) == 0);
    }
  }
}

TEST(math_silu) {
  for (const char* isa : test::isas()) {
    const float x[] = {-kInf, -200.0f, -90.0f, -3.0f, 0.0f, 2.0f, 100.0f, 1e30f, NAN};
    float y[9];
    select_kernels(isa).math.silu(x, 9, y);
    CHECK(std::isnan(y[0]));  // -inf * 0, as in every framework
    CHECK(y[1] == 0 && y[2] == 0 && y[4] == 0 && y[6] == 100.0f && y[7] == 1e30f && std::isnan(y[8]));
    CHECK(std::abs(y[3] + 0.14227762f) < 1e-6f && std::abs(y[5] - 1.7615942f) < 1e-6f);
  }
}

TEST(math_rms_norm) {
  for (const char* isa : test::isas()) {
    Random random(2);
    for (size_t n : {1, 5, 8, 31, 32, 64, 100, 576, 1536}) {
      std::vector<float> x(n), w(n), y(n);
      for (size_t i = 0; i < n; ++i) x[i] = random.heavy(), w[i] = random.uniform();
      select_kernels(isa).math.rms_norm(x.data(), w.data(), 1e-5f, n, y.data());
      double sum = 0;
      for (float v : x) sum += static_cast<double>(v) * v;
      const double inv = 1 / std::sqrt(sum / static_cast<double>(n) + 1e-5);
      for (size_t i = 0; i < n; ++i)
        CHECK(std::abs(y[i] - x[i] * inv * w[i]) <= 1e-6 * std::abs(x[i] * inv * w[i]) + 1e-12, isa << " " << n);
    }
  }
}

TEST(math_rope) {
  for (const char* isa : test::isas()) {
    Random random(3);
    for (size_t half : {1, 8, 12, 32, 64}) {
      std::vector<float> x(2 * half), c(half), s(half), y(2 * half);
      for (float& v : x) v = random.heavy();
      for (size_t i = 0; i < half; ++i) {
        const double angle = 3 * random.uniform();
        c[i] = static_cast<float>(std::cos(angle)), s[i] = static_cast<float>(std::sin(angle));
      }
      select_kernels(isa).math.rope(x.data(), c.data(), s.data(), half, y.data());
      for (size_t i = 0; i < half; ++i) {
        const double a = x[i], b = x[half + i];
        CHECK(std::abs(y[i] - (a * c[i] - b * s[i])) < 2e-6);
        CHECK(std::abs(y[half + i] - (b * c[i] + a * s[i])) < 2e-6);
      }
    }
  }
}
