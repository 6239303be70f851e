// Passes over a row of logits, for one instruction set.
#include "dispatch_table.hpp"
#include "simd.hpp"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr size_t kVectors = kSampleGroup / 8;

/// The group at x, or its first n logits followed by -inf, in `filled`.
OCTAVO_INLINE const float* whole_group(const float* x, size_t n, float* filled) {
  if (n >= kSampleGroup) return x;
  for (size_t i = 0; i < kSampleGroup; ++i) filled[i] = i < n ? x[i] : -__builtin_inff();
  return filled;
}

/// 2^x for x <= 0, 0 below -126 and for -inf: exp2_down of math.hpp with every product rounded before it is added, so
/// that machines with and without fused operations agree. Relative error below 4e-7.
OCTAVO_INLINE f32x8 exp2_unfused(f32x8 x) {
  const f32x8 y = max(set1(-126.0f), x);
  const i32x8 n = round_to_int(y);
  const f32x8 r = y - to_f32(n);
  f32x8 p = set1(1.3264637e-3f);
  p = p * r + set1(9.671482e-3f);
  p = p * r + set1(5.5507336e-2f);
  p = p * r + set1(0.24022242f);
  p = p * r + set1(0.693147f);
  p = p * r + set1(1.0f);
  return select(x < set1(-126.0f), set1(0), bits<f32x8>(bits<i32x8>(p) + (n << 23)));
}

OCTAVO_INLINE f32x8 weight(f32x8 x, f32x8 top, f32x8 scale) { return exp2_unfused((x - top) * scale); }

void maxima(const float* x, size_t n, float* out) {
  float filled[kSampleGroup];
  i32x8 nan = set1i(0);
  for (size_t i = 0; i < n; i += kSampleGroup) {
    const float* group = whole_group(x + i, n - i, filled);
    f32x8 v[kVectors];
    unroll<kVectors>([&](auto j) OCTAVO_BODY {
      v[j] = loadf(group + 8 * j);
      nan |= v[j] != v[j];
    });
    const f32x8 low = max(max(v[0], v[1]), max(v[2], v[3])), high = max(max(v[4], v[5]), max(v[6], v[7]));
    out[i / kSampleGroup] = hmax(max(low, high));
  }
  if (hsum(nan) != 0) out[0] = __builtin_nanf("");
}

void weights(const float* x, size_t n, float top, float scale, float* out) {
  const f32x8 t = set1(top), s = set1(scale);
  size_t i = 0;
  for (; i + 8 <= n; i += 8) store(out + i, weight(loadf(x + i), t, s));
  if (i < n) store_partial(out + i, weight(load_partial(x + i, n - i), t, s), n - i);
}

double weight_sum(const float* x, size_t n, float top, float scale) {
  const f32x8 t = set1(top), s = set1(scale);
  float filled[kSampleGroup];
  double sum = 0;
  for (size_t i = 0; i < n; i += kSampleGroup) {
    const float* group = whole_group(x + i, n - i, filled);
    f32x8 w[kVectors];
    unroll<kVectors>([&](auto j) OCTAVO_BODY { w[j] = weight(loadf(group + 8 * j), t, s); });
    const f32x8 tree = ((w[0] + w[1]) + (w[2] + w[3])) + ((w[4] + w[5]) + (w[6] + w[7]));
    sum += static_cast<double>(hsum(tree));
  }
  return sum;
}

size_t gather(const float* x, size_t n, const float* maxima, float cut, float* values, int32_t* ids) {
  size_t found = 0;
  for (size_t i = 0; i < n; i += kSampleGroup) {
    if (!(maxima[i / kSampleGroup] >= cut)) continue;
    const size_t end = min_of(n, i + kSampleGroup);
    for (size_t j = i; j < end; ++j) {  // without a branch: what is not kept is written over
      values[found] = x[j];
      ids[found] = static_cast<int32_t>(j);
      found += x[j] >= cut;
    }
  }
  return found;
}

}  // namespace

SamplingKernels sampling_kernels() {
  return {.maxima = maxima, .weights = weights, .weight_sum = weight_sum, .gather = gather};
}

}  // namespace octavo::OCTAVO_ISA
