// Eight-lane vectors, one meaning on every instruction set.
//
// Include only from kernel sources, which are compiled once per instruction set with OCTAVO_ISA set to its name; all
// code here lies in namespace octavo::OCTAVO_ISA and is inlined, so that nothing compiled for one set can be called
// from another. Kernel sources use no std:: templates for the same reason.
//
// The types are compiler vector extensions: + - * / & | ^ ~ << >> and comparisons work on them everywhere (a
// comparison gives i32x8 lanes of 0 or -1). Only what these lack is a function here.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifndef OCTAVO_ISA
#error "simd.hpp belongs to kernel sources, which CMake compiles with OCTAVO_ISA"
#endif

#if defined(OCTAVO_ISA_avx2) || defined(OCTAVO_ISA_avx512)
#define OCTAVO_AVX2 1
#include <immintrin.h>
#else
#define OCTAVO_AVX2 0
#if defined(__SSE2__)
#include <emmintrin.h>
#endif
#endif
#if defined(OCTAVO_ISA_avx512)
#define OCTAVO_VNNI 1
#else
#define OCTAVO_VNNI 0
#endif

#define OCTAVO_INLINE static inline __attribute__((always_inline))
#define OCTAVO_MEMBER __attribute__((always_inline)) inline

namespace octavo::OCTAVO_ISA {

using f32x8 = float __attribute__((vector_size(32)));
using i32x8 = int32_t __attribute__((vector_size(32)));
using u32x8 = uint32_t __attribute__((vector_size(32)));
using i16x16 = int16_t __attribute__((vector_size(32)));
using u16x16 = uint16_t __attribute__((vector_size(32)));
using u16x8 = uint16_t __attribute__((vector_size(16)));
using i16x8 = int16_t __attribute__((vector_size(16)));
using i8x16 = int8_t __attribute__((vector_size(16)));
using u8x16 = uint8_t __attribute__((vector_size(16)));
using i8x8 = int8_t __attribute__((vector_size(8)));
using u8x8 = uint8_t __attribute__((vector_size(8)));
using i8x32 = int8_t __attribute__((vector_size(32)));
using u8x32 = uint8_t __attribute__((vector_size(32)));

template <class T>
OCTAVO_INLINE T min_of(T a, T b) {
  return a < b ? a : b;
}
template <class T>
OCTAVO_INLINE T max_of(T a, T b) {
  return a < b ? b : a;
}

/// A loop counter that is a constant: `constexpr int i = decltype(index)::value`, or implicitly an int.
template <int kValue>
struct Index {
  static constexpr int value = kValue;
  constexpr operator int() const { return kValue; }
};

/// f(Index<0>{}) ... f(Index<n - 1>{}), written out before the compiler places variables: arrays that are indexed by such
/// counters live in registers, which loops unrolled by the optimizer do not achieve.
template <int n, class F>
OCTAVO_INLINE void unroll(F&& f) {
  if constexpr (n > 0) {
    unroll<n - 1>(f);
    f(Index<n - 1>{});
  }
}
/// Marks the lambda that `unroll` is given.
#define OCTAVO_BODY __attribute__((always_inline))

/// Keeps a running sum where it is written: compilers otherwise move chains of additions behind all the products that they
/// add, which then fill the stack.
template <class V>
OCTAVO_INLINE void pin(V& v) {
#if OCTAVO_AVX2
  asm("" : "+x"(v));
#else
  (void)v;
#endif
}

// ---- reinterpretation, loads and stores (no alignment needed) ----

template <class To, class From>
OCTAVO_INLINE To bits(From v) {
  static_assert(sizeof(To) == sizeof(From));
  To r;
  __builtin_memcpy(&r, &v, sizeof(To));
  return r;
}

template <class V>
OCTAVO_INLINE V load(const void* p) {
  V r;
  __builtin_memcpy(&r, p, sizeof(V));
  return r;
}
OCTAVO_INLINE f32x8 loadf(const float* p) { return load<f32x8>(p); }

template <class V>
OCTAVO_INLINE void store(void* p, V v) {
  __builtin_memcpy(p, &v, sizeof(V));
}

OCTAVO_INLINE f32x8 set1(float x) { return f32x8{x, x, x, x, x, x, x, x}; }
OCTAVO_INLINE i32x8 set1i(int32_t x) { return i32x8{x, x, x, x, x, x, x, x}; }
OCTAVO_INLINE u8x32 set1u8(uint8_t x) {
  const uint32_t w = 0x01010101u * x;
  return bits<u8x32>(u32x8{w, w, w, w, w, w, w, w});
}

/// The first n (0..8) floats of p; the other lanes are zero. Reads nothing past p + n.
OCTAVO_INLINE f32x8 load_partial(const float* p, size_t n) {
  float t[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  for (size_t i = 0; i < n; ++i) t[i] = p[i];
  return loadf(t);
}
/// Writes the first n (0..8) lanes.
OCTAVO_INLINE void store_partial(float* p, f32x8 v, size_t n) {
  float t[8];
  store(t, v);
  for (size_t i = 0; i < n; ++i) p[i] = t[i];
}

// ---- float ----

/// a * b + c: one rounding with FMA hardware, two in the portable build.
OCTAVO_INLINE f32x8 fma(f32x8 a, f32x8 b, f32x8 c) {
#if OCTAVO_AVX2
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}
/// c - a * b, rounded as fma.
OCTAVO_INLINE f32x8 fnma(f32x8 a, f32x8 b, f32x8 c) {
#if OCTAVO_AVX2
  return _mm256_fnmadd_ps(a, b, c);
#else
  return c - a * b;
#endif
}

/// Lane-wise mask ? a : b, for masks of 0 or -1.
OCTAVO_INLINE f32x8 select(i32x8 mask, f32x8 a, f32x8 b) {
#if OCTAVO_AVX2
  return _mm256_blendv_ps(b, a, bits<f32x8>(mask));
#else
  return bits<f32x8>((bits<i32x8>(a) & mask) | (bits<i32x8>(b) & ~mask));
#endif
}

/// a < b ? a : b; a NaN in either gives b. So min(limit, x) keeps a NaN in x.
OCTAVO_INLINE f32x8 min(f32x8 a, f32x8 b) {
#if OCTAVO_AVX2
  return _mm256_min_ps(a, b);
#else
  return select(a < b, a, b);
#endif
}
/// a > b ? a : b; a NaN in either gives b.
OCTAVO_INLINE f32x8 max(f32x8 a, f32x8 b) {
#if OCTAVO_AVX2
  return _mm256_max_ps(a, b);
#else
  return select(a > b, a, b);
#endif
}
OCTAVO_INLINE f32x8 abs(f32x8 a) { return bits<f32x8>(bits<i32x8>(a) & set1i(0x7fffffff)); }

OCTAVO_INLINE i32x8 max(i32x8 a, i32x8 b) {
#if OCTAVO_AVX2
  return bits<i32x8>(_mm256_max_epi32(bits<__m256i>(a), bits<__m256i>(b)));
#else
  const i32x8 m = a > b;
  return (a & m) | (b & ~m);
#endif
}

OCTAVO_INLINE u16x8 max(u16x8 a, u16x8 b) {
#if OCTAVO_AVX2
  return bits<u16x8>(_mm_max_epu16(bits<__m128i>(a), bits<__m128i>(b)));
#else
  const auto m = bits<u16x8>(a > b);
  return (a & m) | (b & ~m);
#endif
}

OCTAVO_INLINE f32x8 to_f32(i32x8 a) { return __builtin_convertvector(a, f32x8); }
/// Nearest integer, ties to even, for |a| < 2^22. Other values give an unspecified integer.
OCTAVO_INLINE i32x8 round_to_int(f32x8 a) {
#if OCTAVO_AVX2
  return bits<i32x8>(_mm256_cvtps_epi32(a));
#else
  const f32x8 magic = set1(12582912.0f);  // 1.5 * 2^23: the sum's low mantissa bits are the integer
  return bits<i32x8>(a + magic) - bits<i32x8>(magic);
#endif
}

/// Sum of the lanes in a fixed order: ((0+4)+(2+6)) + ((1+5)+(3+7)).
OCTAVO_INLINE float hsum(f32x8 a) {
#if OCTAVO_AVX2
  const __m128 four = _mm256_castps256_ps128(a) + _mm256_extractf128_ps(a, 1), two = four + _mm_movehl_ps(four, four);
  return two[0] + two[1];
#else
  return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]));
#endif
}
/// Largest lane; which of two zeros is unspecified.
OCTAVO_INLINE float hmax(f32x8 a) {
#if OCTAVO_AVX2
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
#else
  float m = a[0];
  for (int i = 1; i < 8; ++i) m = m < a[i] ? a[i] : m;
  return m;
#endif
}
OCTAVO_INLINE int32_t hsum(i32x8 a) { return a[0] + a[1] + a[2] + a[3] + a[4] + a[5] + a[6] + a[7]; }
OCTAVO_INLINE int32_t hmax(i32x8 a) {
  int32_t m = a[0];
  for (int i = 1; i < 8; ++i) m = m < a[i] ? a[i] : m;
  return m;
}
OCTAVO_INLINE uint16_t hmax(u16x8 a) {
#if OCTAVO_AVX2
  return static_cast<uint16_t>(~_mm_cvtsi128_si32(_mm_minpos_epu16(bits<__m128i>(~a))));
#else
  uint16_t m = a[0];
  for (int i = 1; i < 8; ++i) m = m < a[i] ? a[i] : m;
  return m;
#endif
}

// ---- half precision ----

/// f16 bits in the low half of each lane -> f32, exact; subnormals, infinities and NaN included.
OCTAVO_INLINE f32x8 f16_lanes_to_f32(i32x8 h) {
  const i32x8 magnitude = (h & set1i(0x7fff)) << 13;
  const i32x8 sign = (h & set1i(0x8000)) << 16;
  // Scaling by 2^112 moves the exponent bias from 15 to 127 and normalizes subnormals.
  const f32x8 finite = bits<f32x8>(magnitude) * bits<f32x8>(set1i((254 - 15) << 23));
  const i32x8 special = (h & set1i(0x7c00)) == set1i(0x7c00);
  const i32x8 value = (bits<i32x8>(finite) & ~special) | ((magnitude | set1i(0x7f800000)) & special);
  return bits<f32x8>(value | sign);
}

/// Eight unsigned 16-bit values -> i32 lanes.
OCTAVO_INLINE i32x8 load_u16(const void* p) {
#if OCTAVO_AVX2
  return bits<i32x8>(_mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))));
#else
  uint16_t t[8];
  memcpy(t, p, sizeof t);
  return i32x8{t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7]};
#endif
}
/// Eight f16 values -> f32 lanes.
OCTAVO_INLINE f32x8 load_f16(const void* p) {
#if OCTAVO_AVX2
  return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p)));
#else
  return f16_lanes_to_f32(load_u16(p));
#endif
}
/// Eight bf16 values -> f32 lanes.
OCTAVO_INLINE f32x8 load_bf16(const void* p) { return bits<f32x8>(load_u16(p) << 16); }
/// Eight unsigned bytes -> i32 lanes.
OCTAVO_INLINE i32x8 load_u8(const void* p) {
#if OCTAVO_AVX2
  return bits<i32x8>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p))));
#else
  uint8_t t[8];
  memcpy(t, p, sizeof t);
  return i32x8{t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7]};
#endif
}
/// Sixteen signed bytes -> 16-bit lanes.
OCTAVO_INLINE i16x16 load_i8x16(const void* p) {
#if OCTAVO_AVX2
  return bits<i16x16>(_mm256_cvtepi8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(p))));
#else
  return __builtin_convertvector(load<i8x16>(p), i16x16);
#endif
}
/// Eight signed bytes -> i32 lanes.
OCTAVO_INLINE i32x8 load_i8(const void* p) {
#if OCTAVO_AVX2
  return bits<i32x8>(_mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p))));
#else
  int8_t t[8];
  memcpy(t, p, sizeof t);
  return i32x8{t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7]};
#endif
}

/// f32 lanes -> eight f16 values, rounded to nearest even; too large gives infinity.
OCTAVO_INLINE void store_f16(void* p, f32x8 v) {
#if OCTAVO_AVX2
  _mm_storeu_si128(static_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#else
  uint16_t out[8];
  for (int i = 0; i < 8; ++i) {
    const float f = v[i];
    uint32_t u;
    __builtin_memcpy(&u, &f, 4);
    const uint32_t sign = (u >> 16) & 0x8000u;
    u &= 0x7fffffffu;
    uint32_t h;
    if (u > 0x7f800000u) {
      h = 0x7e00u | ((u >> 13) & 0x3ffu);  // NaN, quiet, payload kept
    } else if (u >= 0x477ff000u) {
      h = 0x7c00u;  // rounds to 65520 or more
    } else if (u < 0x38800000u) {
      float shifted;  // subnormal: adding 0.5 leaves the value in the low mantissa bits, rounded to nearest even
      __builtin_memcpy(&shifted, &u, 4);
      shifted += 0.5f;
      __builtin_memcpy(&u, &shifted, 4);
      h = u - 0x3f000000u;
    } else {
      h = (u + 0xfffu + ((u >> 13) & 1u) - 0x38000000u) >> 13;
    }
    out[i] = static_cast<uint16_t>(h | sign);
  }
  memcpy(p, out, sizeof out);
#endif
}

// ---- 8-bit integers ----

/// 32 values in -128..127 as bytes, in order.
OCTAVO_INLINE i8x32 pack_i8(i32x8 a, i32x8 b, i32x8 c, i32x8 d) {
#if OCTAVO_AVX2
  const __m256i ab = _mm256_packs_epi32(bits<__m256i>(a), bits<__m256i>(b));
  const __m256i cd = _mm256_packs_epi32(bits<__m256i>(c), bits<__m256i>(d));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packs work within 128-bit halves
  return bits<i8x32>(_mm256_permutevar8x32_epi32(_mm256_packs_epi16(ab, cd), order));
#else
  int8_t t[32];
  for (int i = 0; i < 8; ++i) {
    t[i] = static_cast<int8_t>(a[i]);
    t[8 + i] = static_cast<int8_t>(b[i]);
    t[16 + i] = static_cast<int8_t>(c[i]);
    t[24 + i] = static_cast<int8_t>(d[i]);
  }
  return load<i8x32>(t);
#endif
}

/// Four consecutive bytes, repeated in every 32-bit lane.
OCTAVO_INLINE i8x32 broadcast_quad(const int8_t* p) {
  int32_t w;
  __builtin_memcpy(&w, p, 4);
  return bits<i8x32>(set1i(w));
}

/// 16-bit lane i = u[2i] * s[2i] + u[2i+1] * s[2i+1]. The caller ensures that it fits 16 bits.
OCTAVO_INLINE i16x16 mul_pairs(u8x32 u, i8x32 s) {
#if OCTAVO_AVX2
  return bits<i16x16>(_mm256_maddubs_epi16(bits<__m256i>(u), bits<__m256i>(s)));
#else
  const i16x16 u16 = bits<i16x16>(u), s16 = bits<i16x16>(s);
  const i16x16 even = (u16 & 0xff) * ((s16 << 8) >> 8);
  const i16x16 odd = ((u16 >> 8) & 0xff) * (s16 >> 8);
  return even + odd;
#endif
}

/// 32-bit lane i = a[2i] + a[2i+1].
OCTAVO_INLINE i32x8 add_pairs(i16x16 a) {
#if OCTAVO_AVX2
  return bits<i32x8>(_mm256_madd_epi16(bits<__m256i>(a), _mm256_set1_epi16(1)));
#else
  const i32x8 w = bits<i32x8>(a);
  return ((w << 16) >> 16) + (w >> 16);
#endif
}

/// acc + the sums of four products u * s per 32-bit lane. Exact while each pair's sum fits 16 bits.
OCTAVO_INLINE i32x8 dot_quads(i32x8 acc, u8x32 u, i8x32 s) {
#if OCTAVO_VNNI
  return bits<i32x8>(_mm256_dpbusd_epi32(bits<__m256i>(acc), bits<__m256i>(u), bits<__m256i>(s)));
#else
  return acc + add_pairs(mul_pairs(u, s));
#endif
}

/// acc + the sums of four products a * b per 32-bit lane, for any a and for b in -127..127. Exact.
OCTAVO_INLINE i32x8 dot_quads_signed(i32x8 acc, i8x32 a, i8x32 b) {
#if OCTAVO_AVX2
  const __m256i va = bits<__m256i>(a);
  return dot_quads(acc, bits<u8x32>(_mm256_abs_epi8(va)), bits<i8x32>(_mm256_sign_epi8(bits<__m256i>(b), va)));
#else
  const i16x16 a16 = bits<i16x16>(a), b16 = bits<i16x16>(b);
  const i16x16 even = ((a16 << 8) >> 8) * ((b16 << 8) >> 8);
  const i16x16 odd = (a16 >> 8) * (b16 >> 8);
  return acc + add_pairs(even) + add_pairs(odd);
#endif
}

// ---- 16-bit integers ----

/// 16 values in -32768..32767 as 16-bit lanes, in order.
OCTAVO_INLINE i16x16 pack_i16(i32x8 a, i32x8 b) {
#if OCTAVO_AVX2
  // packs works within 128-bit halves: a0 b0 a1 b1 in units of 64 bits.
  return bits<i16x16>(_mm256_permute4x64_epi64(_mm256_packs_epi32(bits<__m256i>(a), bits<__m256i>(b)), 0xd8));
#else
  int16_t t[16];
  for (int i = 0; i < 8; ++i) {
    t[i] = static_cast<int16_t>(a[i]);
    t[8 + i] = static_cast<int16_t>(b[i]);
  }
  return load<i16x16>(t);
#endif
}

/// Eight values in -32768..32767 to 16 bits each.
OCTAVO_INLINE void store_i16(int16_t* p, i32x8 a) {
#if OCTAVO_AVX2
  const __m256i v = bits<__m256i>(a);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1)));
#else
  for (int i = 0; i < 8; ++i) p[i] = static_cast<int16_t>(a[i]);
#endif
}

/// Lanes 4i, 4i + 2, 4i + 1, 4i + 3 in place of 4i .. 4i + 3.
OCTAVO_INLINE i16x16 swap_middle(i16x16 a) {
#if OCTAVO_AVX2
  return bits<i16x16>(_mm256_shufflelo_epi16(_mm256_shufflehi_epi16(bits<__m256i>(a), 0xd8), 0xd8));
#else
  int16_t t[16];
  for (int i = 0; i < 16; ++i) t[i] = a[(i & ~3) | ((i & 1) << 1) | ((i & 2) >> 1)];
  return load<i16x16>(t);
#endif
}

/// Two consecutive 16-bit values, repeated in every 32-bit lane.
OCTAVO_INLINE i16x16 broadcast_pair(const int16_t* p) {
  int32_t w;
  __builtin_memcpy(&w, p, 4);
  return bits<i16x16>(set1i(w));
}

/// acc + a[2i] * b[2i] + a[2i+1] * b[2i+1] per 32-bit lane i.
OCTAVO_INLINE i32x8 add_products(i32x8 acc, i16x16 a, i16x16 b) {
#if OCTAVO_VNNI
  return bits<i32x8>(_mm256_dpwssd_epi32(bits<__m256i>(acc), bits<__m256i>(a), bits<__m256i>(b)));
#elif OCTAVO_AVX2
  return acc + bits<i32x8>(_mm256_madd_epi16(bits<__m256i>(a), bits<__m256i>(b)));
#elif defined(__SSE2__)
  struct Halves {
    __m128i low, high;
  };
  const Halves x = bits<Halves>(a), y = bits<Halves>(b);
  return acc + bits<i32x8>(Halves{_mm_madd_epi16(x.low, y.low), _mm_madd_epi16(x.high, y.high)});
#else
  const i32x8 x = bits<i32x8>(a), y = bits<i32x8>(b);
  return acc + ((x << 16) >> 16) * ((y << 16) >> 16) + (x >> 16) * (y >> 16);
#endif
}

}  // namespace octavo::OCTAVO_ISA
