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

}  // namespace

MathKernels math_kernels() {
  return {.exp = exp_array, .silu = silu_array, .rms_norm = rms_norm, .rope = rope};
}

}  // namespace octavo::OCTAVO_ISA
