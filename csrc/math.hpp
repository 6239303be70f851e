// Functions of vectors that several kernels share. Kernel sources only, as simd.hpp.
#pragma once

#include "simd.hpp"

namespace octavo::OCTAVO_ISA {

/// exp with a relative error below 1e-6. Below -87.33 (where the result would be subnormal) exactly 0, so exp(-inf) = 0;
/// above 88.37 +inf; NaN stays NaN.
///
/// exp(x) = 2^n * exp(r), n = round(x / ln 2), |r| <= ln 2 / 2; exp(r) by its Taylor series to r^7 (remainder 1e-8).
OCTAVO_INLINE f32x8 exp(f32x8 x) {
  const f32x8 low = set1(-87.33f), high = set1(88.37f);
  const f32x8 clamped = max(low, min(high, x));
  const i32x8 n = round_to_int(clamped * set1(1.44269504f));
  const f32x8 nf = to_f32(n);
  f32x8 r = fnma(nf, set1(0.693359375f), clamped);  // ln 2 in two parts; the first has few bits, so nf * it is exact
  r = fnma(nf, set1(-2.12194440e-4f), r);
  f32x8 p = set1(1.0f / 5040);
  p = fma(p, r, set1(1.0f / 720));
  p = fma(p, r, set1(1.0f / 120));
  p = fma(p, r, set1(1.0f / 24));
  p = fma(p, r, set1(1.0f / 6));
  p = fma(p, r, set1(0.5f));
  p = fma(p * r, r, r) + set1(1.0f);
  const f32x8 scale = bits<f32x8>((n + set1i(127)) << 23);
  f32x8 y = p * scale;
  y = select(x < low, set1(0.0f), y);
  return select(x > high, set1(__builtin_inff()), y);
}

/// 2^x for x <= 0 with a relative error below 3e-7; 2^-126 below -126, NaN stays.
///
/// 2^x = 2^n * 2^r, n = round(x), |r| <= 1/2; 2^r by the polynomial of degree 5 through 1 whose largest relative error
/// is least (9.2e-8).
OCTAVO_INLINE f32x8 exp2_down(f32x8 x) {
  x = max(set1(-126.0f), x);
  const i32x8 n = round_to_int(x);
  const f32x8 r = x - to_f32(n);
  f32x8 p = set1(1.3264637e-3f);
  p = fma(p, r, set1(9.671482e-3f));
  p = fma(p, r, set1(5.5507336e-2f));
  p = fma(p, r, set1(0.24022242f));
  p = fma(p, r, set1(0.693147f));
  p = fma(p, r, set1(1.0f));
  // The exponent goes up by n. Where x is NaN the low bits of n are zero and p is NaN.
  return bits<f32x8>(bits<i32x8>(p) + (n << 23));
}

/// x / (1 + exp(-x)).
OCTAVO_INLINE f32x8 silu(f32x8 x) { return x / (set1(1.0f) + exp(-x)); }

/// Sum of squares of x[0..n): four eight-lane sums over blocks of 32, then eights, then a zero-filled tail; fixed order.
OCTAVO_INLINE float sum_of_squares(const float* x, size_t n) {
  f32x8 s0 = set1(0), s1 = set1(0), s2 = set1(0), s3 = set1(0);
  size_t i = 0;
  for (; i + 32 <= n; i += 32) {
    const f32x8 a = loadf(x + i), b = loadf(x + i + 8), c = loadf(x + i + 16), d = loadf(x + i + 24);
    s0 = fma(a, a, s0);
    s1 = fma(b, b, s1);
    s2 = fma(c, c, s2);
    s3 = fma(d, d, s3);
  }
  for (; i + 8 <= n; i += 8) {
    const f32x8 a = loadf(x + i);
    s0 = fma(a, a, s0);
  }
  if (i < n) {
    const f32x8 a = load_partial(x + i, n - i);
    s1 = fma(a, a, s1);
  }
  return hsum((s0 + s1) + (s2 + s3));
}

/// out = x / sqrt(mean(x^2) + eps) * weight, over n values. out may be x.
OCTAVO_INLINE void rms_norm_row(const float* x, const float* weight, float eps, size_t n, float* out) {
  const float mean = sum_of_squares(x, n) / static_cast<float>(n);
  const f32x8 inv = set1(1.0f / __builtin_sqrtf(mean + eps));
  size_t i = 0;
  for (; i + 8 <= n; i += 8) store(out + i, loadf(x + i) * inv * loadf(weight + i));
  if (i < n) store_partial(out + i, load_partial(x + i, n - i) * inv * load_partial(weight + i, n - i), n - i);
}

/// Rotary embedding of one head, half-split: (x[i], x[i + half]) turned by the angle whose cosine and sine are given
/// for i in 0..half. out may be x.
OCTAVO_INLINE void rope_row(const float* x, const float* cosine, const float* sine, size_t half, float* out) {
  size_t i = 0;
  for (; i + 8 <= half; i += 8) {
    const f32x8 a = loadf(x + i), b = loadf(x + half + i), c = loadf(cosine + i), s = loadf(sine + i);
    store(out + i, fnma(b, s, a * c));
    store(out + half + i, fma(a, s, b * c));
  }
  if (i < half) {
    const size_t m = half - i;
    const f32x8 a = load_partial(x + i, m), b = load_partial(x + half + i, m);
    const f32x8 c = load_partial(cosine + i, m), s = load_partial(sine + i, m);
    store_partial(out + i, fnma(b, s, a * c), m);
    store_partial(out + half + i, fma(a, s, b * c), m);
  }
}

}  // namespace octavo::OCTAVO_ISA
