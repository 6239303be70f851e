// Linear layers over quantized weights: integer dot products with 8-bit activations.
//
// Vectors hold eight output rows, so that an output never needs a sum across lanes and has the same order of operations
// for any number of rows. Integer sums are exact and may take any order; the float stage follows linear_types.hpp.
#include "dispatch_table.hpp"
#include "linear_formats.hpp"

namespace octavo::OCTAVO_ISA {
namespace {

// Sum of code products per lane. AVX2 adds `maddubs` results in 16 bits for as long as they fit (kPairsPerFlush pairs of
// quads); VNNI and other sets go straight to 32 bits.
template <class Codes>
struct Products {
#if OCTAVO_VNNI
  i32x8 sum = set1i(0);
  template <int kPair>
  __attribute__((always_inline)) void add(u8x32 low, u8x32 high, const int8_t* q) {
    sum = dot_quads(sum, low, broadcast_quad(q + 4 * kPair));
    sum = dot_quads(sum, high, broadcast_quad(q + 16 + 4 * kPair));
  }
#else
  i16x16 partial;
  i32x8 sum;
  template <int kPair>
  __attribute__((always_inline)) void add(u8x32 low, u8x32 high, const int8_t* q) {
    const i16x16 a = mul_pairs(low, broadcast_quad(q + 4 * kPair));
    const i16x16 b = mul_pairs(high, broadcast_quad(q + 16 + 4 * kPair));
    partial = kPair % Codes::kPairsPerFlush == 0 ? a + b : partial + a + b;
    if constexpr ((kPair + 1) % Codes::kPairsPerFlush == 0) {
      const i32x8 wide = add_pairs(partial);
      sum = kPair < Codes::kPairsPerFlush ? wide : sum + wide;
    }
  }
#endif
};

template <class F>
OCTAVO_INLINE f32x8 accumulate(i32x8 sum, const GroupScale& s, const ActGroup& a, f32x8 acc) {
  if constexpr (F::kZero != 0) sum -= set1i(F::kZero * a.sum);
  acc = fma(to_f32(sum), s.d * set1(a.d), acc);
  if constexpr (F::kHasMin) acc = fma(s.m, set1(a.d_sum), acc);
  return acc;
}

// One group for kRows batch rows: acc[m] gains the products of `codes` with a[m].
template <class F, int kRows>
struct Group {
  template <int kPair>
  OCTAVO_INLINE void pair(const uint8_t* codes, const ActGroup* const* a, Products<typename F::Codes>* p) {
    u8x32 low, high;
    F::Codes::template pair<kPair>(codes, low, high);
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) p[m].template add<kPair>(low, high, a[m]->q);
  }

  OCTAVO_INLINE void run(const typename F::Header& header, const uint8_t* tile, size_t g, const uint8_t* codes,
                         const ActGroup* const* a, f32x8* acc) {
    const GroupScale s = F::scale(header, tile, g);
    Products<typename F::Codes> p[kRows];
    pair<0>(codes, a, p);
    pair<1>(codes, a, p);
    pair<2>(codes, a, p);
    pair<3>(codes, a, p);
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) acc[m] = accumulate<F>(p[m].sum, s, *a[m], acc[m]);
  }
};

template <int kRows>
struct Group<FormatQ8_0, kRows> {
  OCTAVO_INLINE void run(const FormatQ8_0::Header& header, const uint8_t* tile, size_t g, const uint8_t* codes,
                         const ActGroup* const* a, f32x8* acc) {
    const GroupScale s = FormatQ8_0::scale(header, tile, g);
    i32x8 sum[kRows];
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) sum[m] = set1i(0);
#pragma GCC unroll 8
    for (int q = 0; q < 8; ++q) {
      const i8x32 w = load<i8x32>(codes + 32 * q);
#if OCTAVO_VNNI
      // w + 128 is unsigned; 128 * sum(q) is taken off below.
      const u8x32 u = bits<u8x32>(w) ^ set1u8(128);
#pragma GCC unroll 8
      for (int m = 0; m < kRows; ++m) sum[m] = dot_quads(sum[m], u, broadcast_quad(a[m]->q + 4 * q));
#else
#pragma GCC unroll 8
      for (int m = 0; m < kRows; ++m) sum[m] = dot_quads_signed(sum[m], w, broadcast_quad(a[m]->q + 4 * q));
#endif
    }
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
#if OCTAVO_VNNI
      sum[m] -= set1i(128 * a[m]->sum);
#endif
      acc[m] = accumulate<FormatQ8_0>(sum[m], s, *a[m], acc[m]);
    }
  }
};

template <int kRows>
struct Group<FormatQ6_K, kRows> {
  // A pair of quads adds at most 16,002 to a 16-bit lane in each half: two fit.
  template <int kPair>
  OCTAVO_INLINE void pair(const uint8_t* codes, const ActGroup* const* a, i32x8* low_sum, i32x8* high_sum) {
    u8x32 l0, h0, l1, h1;
    Codes6::pair<kPair>(codes, l0, h0);
    Codes6::pair<kPair + 1>(codes, l1, h1);
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
      const int8_t* q = a[m]->q + 4 * kPair;
      const i8x32 x0 = broadcast_quad(q), x1 = broadcast_quad(q + 4);
      const i8x32 y0 = broadcast_quad(q + 16), y1 = broadcast_quad(q + 20);
#if OCTAVO_VNNI
      low_sum[m] = dot_quads(dot_quads(low_sum[m], l0, x0), l1, x1);
      high_sum[m] = dot_quads(dot_quads(high_sum[m], h0, y0), h1, y1);
#else
      low_sum[m] += add_pairs(mul_pairs(l0, x0) + mul_pairs(l1, x1));
      high_sum[m] += add_pairs(mul_pairs(h0, y0) + mul_pairs(h1, y1));
#endif
    }
  }

  OCTAVO_INLINE void run(const FormatQ6_K::Header& header, const uint8_t* tile, size_t g, const uint8_t* codes,
                         const ActGroup* const* a, f32x8* acc) {
    i32x8 low[kRows], high[kRows];
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
      low[m] = set1i(-FormatQ6_K::kZero * a[m]->sum_low);
      high[m] = set1i(-FormatQ6_K::kZero * (a[m]->sum - a[m]->sum_low));
    }
    pair<0>(codes, a, low, high);
    pair<2>(codes, a, low, high);
    const f32x8 dl = FormatQ6_K::scale(header, tile, 2 * g), dh = FormatQ6_K::scale(header, tile, 2 * g + 1);
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
      const f32x8 d = set1(a[m]->d);
      acc[m] = fma(to_f32(low[m]), dl * d, acc[m]);
      acc[m] = fma(to_f32(high[m]), dh * d, acc[m]);
    }
  }
};

// Batch rows m .. m + kRows times blocks b .. b + kBlocks.
template <class F, int kRows, int kBlocks>
void tile_product(const PackedMatrix& w, const ActRows& x, size_t m, size_t b, const LinearOutput& to) {
  constexpr size_t kTile = tile_bytes<F>();
  const ActGroup* a[kRows];
  const uint8_t* t[kBlocks];
  f32x8 acc[kBlocks][kRows];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) a[i] = x.q + (m + static_cast<size_t>(i)) * x.q_stride;
#pragma GCC unroll 8
  for (int j = 0; j < kBlocks; ++j) {
    t[j] = w.data + (b + static_cast<size_t>(j)) * w.block_bytes;
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) acc[j][i] = set1(0);
  }
  const size_t tiles = w.cols / (kGroup * F::kGroups);
  for (size_t k = 0; k < tiles; ++k) {
    typename F::Header header[kBlocks];
#pragma GCC unroll 8
    for (int j = 0; j < kBlocks; ++j) header[j] = F::header(t[j]);
    for (size_t g = 0; g < F::kGroups; ++g) {
#pragma GCC unroll 8
      for (int j = 0; j < kBlocks; ++j)
        Group<F, kRows>::run(header[j], t[j], g, t[j] + F::kHeader + g * F::Codes::kBytes, a, acc[j]);
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) ++a[i];
    }
#pragma GCC unroll 8
    for (int j = 0; j < kBlocks; ++j) t[j] += kTile;
  }
  write<kRows, kBlocks>(acc, w, b, to);
}

template <class F>
void product(const PackedMatrix& w, const ActRows& x, size_t m0, size_t m1, size_t b0, size_t b1,
             const LinearOutput& to) {
  if (m1 - m0 == 1) {
    size_t b = b0;
    for (; b + 2 <= b1; b += 2) tile_product<F, 1, 2>(w, x, m0, b, further(to, 0, b - b0));
    if (b < b1) tile_product<F, 1, 1>(w, x, m0, b, further(to, 0, b - b0));
    return;
  }
  for (size_t b = b0; b < b1; ++b) {
    size_t m = m0;
    for (; m + 4 <= m1; m += 4) tile_product<F, 4, 1>(w, x, m, b, further(to, m - m0, b - b0));
    const LinearOutput rest = further(to, m - m0, b - b0);
    switch (m1 - m) {
      case 3: tile_product<F, 3, 1>(w, x, m, b, rest); break;
      case 2: tile_product<F, 2, 1>(w, x, m, b, rest); break;
      case 1: tile_product<F, 1, 1>(w, x, m, b, rest); break;
    }
  }
}

}  // namespace

void linear_int8(const PackedMatrix& w, const ActRows& x, size_t m0, size_t m1, size_t b0, size_t b1,
                 const LinearOutput& to) {
  switch (w.type) {
    case TensorType::Q4_0: return product<FormatQ4_0>(w, x, m0, m1, b0, b1, to);
    case TensorType::Q4_1: return product<FormatQ4_1>(w, x, m0, m1, b0, b1, to);
    case TensorType::Q5_0: return product<FormatQ5_0>(w, x, m0, m1, b0, b1, to);
    case TensorType::Q5_1: return product<FormatQ5_1>(w, x, m0, m1, b0, b1, to);
    case TensorType::Q8_0: return product<FormatQ8_0>(w, x, m0, m1, b0, b1, to);
    case TensorType::Q4_K: return product<FormatQ4_K>(w, x, m0, m1, b0, b1, to);
    case TensorType::Q5_K: return product<FormatQ5_K>(w, x, m0, m1, b0, b1, to);
    case TensorType::Q6_K: return product<FormatQ6_K>(w, x, m0, m1, b0, b1, to);
    default: __builtin_trap();  // float types go to linear_float
  }
}

}  // namespace octavo::OCTAVO_ISA
