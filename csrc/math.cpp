// Entry points of math.hpp for one instruction set.
#include "math.hpp"

#include "dispatch_table.hpp"

namespace octavo::OCTAVO_ISA {
namespace {

void exp_array(const float* x, size_t n, float* out) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8) store(out + i, exp(loadf(x + i)));
  if (i < n) store_partial(out + i, exp(load_partial(x + i, n - i)), n - i);
}

void exp2_down_array(const float* x, size_t n, float* out) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8) store(out + i, exp2_down(loadf(x + i)));
  if (i < n) store_partial(out + i, exp2_down(load_partial(x + i, n - i)), n - i);
}

void silu_array(const float* x, size_t n, float* out) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8) store(out + i, silu(loadf(x + i)));
  if (i < n) store_partial(out + i, silu(load_partial(x + i, n - i)), n - i);
}

void rms_norm(const float* x, const float* weight, float eps, size_t n, float* out) {
  rms_norm_row(x, weight, eps, n, out);
}

void rope(const float* x, const float* cosine, const float* sine, size_t half, float* out) {
  rope_row(x, cosine, sine, half, out);
}

// Exponentials are summed in eight float lanes over runs of 2048 values, and the runs in double, so that the error does
// not grow with the vocabulary.
void log_softmax(const float* x, size_t n, float* out) {
  const f32x8 low = set1(-__builtin_inff());
  f32x8 top = low;
  size_t i = 0;
  for (; i + 8 <= n; i += 8) top = max(top, loadf(x + i));  // a NaN in x is met again in the sum
  float peak = hmax(top);
  for (; i < n; ++i) peak = peak < x[i] ? x[i] : peak;
  double sum = 0;
  for (size_t run = 0; run < n; run += 2048) {
    const size_t end = min_of(run + 2048, n);
    f32x8 s = set1(0);
    for (i = run; i + 8 <= end; i += 8) s += exp(loadf(x + i) - set1(peak));
    if (i < end) {
      float t[8];
      for (size_t j = 0; j < 8; ++j) t[j] = i + j < end ? x[i + j] : -__builtin_inff();
      s += exp(loadf(t) - set1(peak));
    }
    sum += static_cast<double>(hsum(s));
  }
  const f32x8 shift = set1(static_cast<float>(__builtin_log(sum)));
  for (i = 0; i + 8 <= n; i += 8) store(out + i, loadf(x + i) - set1(peak) - shift);
  if (i < n) store_partial(out + i, load_partial(x + i, n - i) - set1(peak) - shift, n - i);
}

}  // namespace

MathKernels math_kernels() {
  return {.exp = exp_array,
          .exp2_down = exp2_down_array,
          .silu = silu_array,
          .rms_norm = rms_norm,
          .rope = rope,
          .log_softmax = log_softmax};
}

}  // namespace octavo::OCTAVO_ISA
