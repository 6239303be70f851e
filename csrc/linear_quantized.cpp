// Linear layers over quantized weights: integer dot products with 16-bit activations.
//
// Vectors hold eight output rows, so that an output never needs a sum across lanes and has the same order of operations
// for any number of rows. Integer sums are exact and may take any order; the float stage follows linear_types.hpp.
#include "dispatch_table.hpp"
#include "linear_formats.hpp"

namespace octavo::OCTAVO_ISA {
namespace {

// The codes of one group in one or two neighbouring blocks.
template <class Codes, int kBlocks>
struct BlockCodes {
  Codes first, second;
  template <int j>
  OCTAVO_MEMBER Codes& at() {
    if constexpr (j == 0) return first;
    return second;
  }
};
template <class F, int kBlocks>
OCTAVO_INLINE BlockCodes<typename F::Codes, kBlocks> group_codes(const uint8_t* p, size_t block_bytes) {
  using Codes = typename F::Codes;
  return {Codes(p), Codes(kBlocks == 1 ? p : p + block_bytes)};
}

// Batch rows m .. m + kRows times blocks b .. b + kBlocks. Asks for the weights `ahead` bytes further on: the hardware's own
// prefetching starts anew in every block.
template <class F, int kRows, int kBlocks>
void tile_product(const PackedMatrix& w, const ActRows& x, size_t m, size_t b, size_t ahead, const LinearOutput& to) {
  const ActGroup* a = x.q + m * x.q_stride;
  const size_t stride = x.q_stride, row_stride = stride * (sizeof(ActGroup) / sizeof(int16_t));
  const uint8_t* t = w.data + b * w.block_bytes;
  const size_t block_bytes = w.block_bytes;
  f32x8 acc[kBlocks][kRows];
  unroll<kBlocks>([&](auto j) OCTAVO_BODY { unroll<kRows>([&](auto i) OCTAVO_BODY { acc[j][i] = set1(0); }); });

  const size_t tiles = w.cols / (kGroup * F::kGroups);
  for (size_t k = 0; k < tiles; ++k, t += tile_bytes<F>()) {
    for (size_t i = 0; i < tile_bytes<F>(); i += 64)
      unroll<kBlocks>([&](auto j) OCTAVO_BODY { __builtin_prefetch(t + j * block_bytes + ahead + i); });
    typename F::Header header[kBlocks];
    unroll<kBlocks>([&](auto j) OCTAVO_BODY { header[j] = F::header(t + j * block_bytes); });
    for (size_t g = 0; g < F::kGroups; ++g, ++a) {
      i32x8 sum[F::kHalves ? 2 : 1][kBlocks][kRows];
      unroll<F::kHalves ? 2 : 1>([&](auto h) OCTAVO_BODY {
        unroll<kBlocks>([&](auto j) OCTAVO_BODY { unroll<kRows>([&](auto i) OCTAVO_BODY { sum[h][j][i] = set1i(0); }); });
      });
      auto codes = group_codes<F, kBlocks>(t + F::kHeader + g * F::Codes::kBytes, block_bytes);
      const int16_t* q = a->q;
      for (int round = 0; round < 4; ++round, q += 4) {
        unroll<4>([&](auto step) OCTAVO_BODY {
          i16x16 v[kBlocks];
          unroll<kBlocks>([&](auto j) OCTAVO_BODY { v[j] = codes.template at<j>().template step<step>(); });
          unroll<kRows>([&](auto i) OCTAVO_BODY {
            const i16x16 x = broadcast_pair(q + i * row_stride + 16 * (step / 2) + 2 * (step % 2));
            unroll<kBlocks>([&](auto j) OCTAVO_BODY {
              i32x8& s = sum[F::kHalves ? step / 2 : 0][j][i];
              s = add_products(s, v[j], x);
              pin(s);
            });
          });
        });
        unroll<kBlocks>([&](auto j) OCTAVO_BODY { codes.template at<j>().next(); });
      }
      unroll<kBlocks>([&](auto j) OCTAVO_BODY {
        const GroupScale s = F::scale(header[j], t + j * block_bytes, g);
        unroll<kRows>([&](auto i) OCTAVO_BODY {
          const ActGroup& group = a[i * stride];
          const f32x8 d = set1(group.d);
          if constexpr (F::kHalves) {
            const i32x8 low = sum[0][j][i] - set1i(F::kZero * group.sum_low);
            const i32x8 high = sum[1][j][i] - set1i(F::kZero * (group.sum - group.sum_low));
            acc[j][i] = fma(to_f32(high), s.m * d, fma(to_f32(low), s.d * d, acc[j][i]));
          } else {
            i32x8 total = sum[0][j][i];
            if constexpr (F::kZero != 0) total -= set1i(F::kZero * group.sum);
            acc[j][i] = fma(to_f32(total), s.d * d, acc[j][i]);
            if constexpr (F::kHasMin) acc[j][i] = fma(s.m, set1(group.d_sum), acc[j][i]);
          }
        });
      });
    }
  }
  write<kRows, kBlocks>(acc, w, b, to);
}

// Rows that share a block's unpacked codes. More need more registers than AVX2 has; the portable path has fewer still.
constexpr size_t kRowsAtOnce = OCTAVO_AVX2 ? 4 : 2;

// All rows times the pair of blocks b, b + 1.
template <class F>
void pair_product(const PackedMatrix& w, const ActRows& x, size_t m0, size_t m1, size_t b, const LinearOutput& to) {
  size_t m = m0, ahead = 2 * w.block_bytes;  // the next pair; for the first rows only
  for (; m + kRowsAtOnce <= m1; m += kRowsAtOnce, ahead = 0)
    tile_product<F, kRowsAtOnce, 2>(w, x, m, b, ahead, further(to, m - m0, 0));
  const LinearOutput rest = further(to, m - m0, 0);
  if constexpr (kRowsAtOnce == 4) {
    if (m1 - m == 3) return tile_product<F, 3, 2>(w, x, m, b, ahead, rest);
    if (m1 - m == 2) return tile_product<F, 2, 2>(w, x, m, b, ahead, rest);
  }
  if (m1 - m == 1) tile_product<F, 1, 2>(w, x, m, b, ahead, rest);
}

// Pairs of blocks outermost: their weights stay in the first-level cache for all rows.
template <class F>
void product(const PackedMatrix& w, const ActRows& x, size_t m0, size_t m1, size_t b0, size_t b1,
             const LinearOutput& to) {
  size_t b = b0;
  for (; b + 2 <= b1; b += 2) pair_product<F>(w, x, m0, m1, b, further(to, 0, b - b0));
  if (b == b1) return;
  for (size_t m = m0; m < m1; ++m) tile_product<F, 1, 1>(w, x, m, b, 0, further(to, m - m0, b - b0));
}

}  // namespace

void linear_quantized(const PackedMatrix& w, const ActRows& x, size_t m0, size_t m1, size_t b0, size_t b1,
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
    default: __builtin_trap();  // float types go to linear_float.cpp
  }
}

}  // namespace octavo::OCTAVO_ISA
