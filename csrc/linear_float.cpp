// Linear layers over F32, F16 and BF16 weights with float activations, and the rows that linear layers read.
#include "dispatch_table.hpp"
#include "linear_formats.hpp"
#include "math.hpp"

namespace octavo::OCTAVO_ISA {
namespace {

struct WeightF32 {
  static constexpr size_t kBytes = 4;
  OCTAVO_INLINE f32x8 at(const uint8_t* p) { return load<f32x8>(p); }
};
struct WeightF16 {
  static constexpr size_t kBytes = 2;
  OCTAVO_INLINE f32x8 at(const uint8_t* p) { return load_f16(p); }
};
struct WeightBF16 {
  static constexpr size_t kBytes = 2;
  OCTAVO_INLINE f32x8 at(const uint8_t* p) { return load_bf16(p); }
};

// Batch rows m .. m + kRows times blocks b .. b + kBlocks: one chain of fma per output, several outputs at a time to hide
// its latency.
template <class W, int kRows, int kBlocks>
void tile_product(const PackedMatrix& w, const ActRows& x, size_t m, size_t b, const LinearOutput& to) {
  const float* a[kRows];
  const uint8_t* t[kBlocks];
  f32x8 acc[kBlocks][kRows];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) a[i] = x.x + (m + static_cast<size_t>(i)) * x.x_stride;
#pragma GCC unroll 8
  for (int j = 0; j < kBlocks; ++j) {
    t[j] = w.data + (b + static_cast<size_t>(j)) * w.block_bytes;
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) acc[j][i] = set1(0);
  }
  for (size_t k = 0; k < w.cols; ++k) {
    f32x8 v[kBlocks];
#pragma GCC unroll 8
    for (int j = 0; j < kBlocks; ++j) v[j] = W::at(t[j] + k * kBlockRows * W::kBytes);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const f32x8 s = set1(a[i][k]);
#pragma GCC unroll 8
      for (int j = 0; j < kBlocks; ++j) acc[j][i] = fma(v[j], s, acc[j][i]);
    }
  }
  write<kRows, kBlocks>(acc, w, b, to);
}

// All blocks b0..b1 for kRows batch rows, kBlocks at a time.
template <class W, int kRows, int kBlocks>
void row_product(const PackedMatrix& w, const ActRows& x, size_t m, size_t b0, size_t b1, const LinearOutput& to) {
  size_t b = b0;
  for (; b + kBlocks <= b1; b += kBlocks) tile_product<W, kRows, kBlocks>(w, x, m, b, further(to, 0, b - b0));
  for (; b < b1; ++b) tile_product<W, kRows, 1>(w, x, m, b, further(to, 0, b - b0));
}

template <class W>
void product(const PackedMatrix& w, const ActRows& x, size_t m0, size_t m1, size_t b0, size_t b1,
             const LinearOutput& to) {
  if (m1 - m0 == 1) return row_product<W, 1, 8>(w, x, m0, b0, b1, to);
  // Pairs of blocks outermost, so that their weights stay in the first-level cache for all rows.
  for (size_t b = b0; b < b1; b += 2) {
    const size_t end = min_of(b + 2, b1);
    size_t m = m0;
    for (; m + 4 <= m1; m += 4) row_product<W, 4, 2>(w, x, m, b, end, further(to, m - m0, b - b0));
    const LinearOutput rest = further(to, m - m0, b - b0);
    switch (m1 - m) {
      case 3: row_product<W, 3, 2>(w, x, m, b, end, rest); break;
      case 2: row_product<W, 2, 2>(w, x, m, b, end, rest); break;
      case 1: row_product<W, 1, 2>(w, x, m, b, end, rest); break;
    }
  }
}

void forward(const PackedMatrix& w, const ActRows& x, size_t m0, size_t m1, size_t b0, size_t b1,
             const LinearOutput& to) {
  switch (w.type) {
    case TensorType::F32: return product<WeightF32>(w, x, m0, m1, b0, b1, to);
    case TensorType::F16: return product<WeightF16>(w, x, m0, m1, b0, b1, to);
    case TensorType::BF16: return product<WeightBF16>(w, x, m0, m1, b0, b1, to);
    default: return linear_quantized(w, x, m0, m1, b0, b1, to);
  }
}

constexpr float kTop = 32767.0f;

void quantize_row(const float* x, size_t cols, ActGroup* out) {
  for (size_t k = 0; k < cols; k += kGroup, ++out) {
    const f32x8 v[4] = {loadf(x + k), loadf(x + k + 8), loadf(x + k + 16), loadf(x + k + 24)};
    // Magnitudes order as integers, with NaN above infinity above all numbers.
    const i32x8 most = max(max(bits<i32x8>(abs(v[0])), bits<i32x8>(abs(v[1]))),
                           max(bits<i32x8>(abs(v[2])), bits<i32x8>(abs(v[3]))));
    const int32_t peak_bits = hmax(most);
    const float peak = bits<float>(peak_bits);
    const float inverse = kTop / peak;
    if (peak_bits >= 0x7f800000 || !(inverse < __builtin_inff())) {
      // Not finite: the group poisons what reads it. Or all (but) zero: kTop / peak overflows below 1e-34.
      *out = ActGroup{};
      if (peak_bits >= 0x7f800000) out->d = out->d_sum = __builtin_nanf("");
      continue;
    }
    i32x8 q[4];
    for (int i = 0; i < 4; ++i) q[i] = round_to_int(v[i] * set1(inverse));
    store(out->q, swap_middle(pack_i16(q[0], q[1])));
    store(out->q + 16, swap_middle(pack_i16(q[2], q[3])));
    out->sum_low = hsum(q[0] + q[1]);
    out->sum = out->sum_low + hsum(q[2] + q[3]);
    out->d = peak / kTop;
    out->d_sum = out->d * static_cast<float>(out->sum);
  }
}

void silu_mul(const float* gate, const float* up, size_t n, float* out) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8) store(out + i, silu(loadf(gate + i)) * loadf(up + i));
  if (i < n) store_partial(out + i, silu(load_partial(gate + i, n - i)) * load_partial(up + i, n - i), n - i);
}

}  // namespace

LinearKernels linear_kernels() {
  return {.forward = forward, .quantize_row = quantize_row, .silu_mul = silu_mul};
}

}  // namespace octavo::OCTAVO_ISA
