// What kernels and callers of linear layers share: plain data, no code (kernel sources include this).
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace octavo {

/// Types of stored weights; the names are GGUF's.
enum class TensorType : int { F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K };
inline constexpr int kTensorTypes = 11;

/// Consecutive inputs that share one activation scale.
inline constexpr size_t kGroup = 32;
/// Output rows that one vector of weights holds.
inline constexpr size_t kBlockRows = 8;

/// 32 inputs of one row as 16-bit integers: x ~ d * q. A group that held a NaN or an infinity has d = NaN and q = 0, so
/// that every output that reads it is NaN.
///
/// Why not 8 bits, which would be about half again as fast: on small models they cost 0.3 % of perplexity.
struct ActGroup {
  float d;            // largest magnitude / 32767
  float d_sum;        // d * sum
  int32_t sum;        // of all codes
  int32_t sum_low;    // of the codes of inputs 0..15
  int16_t q[kGroup];  // codes, -32767..32767, nearest even. Inputs 4i, 4i + 2, 4i + 1, 4i + 3 lie at 4i .. 4i + 3.
};
static_assert(sizeof(ActGroup) == 80);

/// Rows as a linear layer reads them. Quantized weights read `q`, float weights read `x`; either is null if unused.
struct ActRows {
  const ActGroup* q;  // row m's groups are q[m * q_stride ..]
  size_t q_stride;
  const float* x;  // row m is x[m * x_stride ..]
  size_t x_stride;
};

/// A weight matrix in the order in which kernels read it. Rows lie in blocks of 8 (the last filled up with zeros); block b
/// begins at data + b * block_bytes. linear_pack.cpp describes the blocks of each type.
struct PackedMatrix {
  TensorType type;
  size_t rows, cols, block_bytes;
  const uint8_t* data;
};

/// Where a product goes. Its batch row m and output row r, both counted from the first that is computed, go to
/// out[m * stride + r]: plus bias[r] unless null, added to what is there if `add`.
struct LinearOutput {
  float* out;
  size_t stride;
  const float* bias;
  bool add;
};

struct LinearKernels {
  /// Rows m0..m1 of `x` times blocks b0..b1 of `w`.
  ///
  /// The arithmetic of one output, which depends on nothing else: for quantized weights, over groups g of 32 inputs in
  /// order, acc = fma(float(isum_g), w.d_g * x.d_g, acc), isum_g the exact integer sum of code products; for types with
  /// a minimum then acc = fma(w.m_g, x.d_sum_g, acc). (Q6_K: two steps, of 16 inputs each.) For float weights, acc = fma(w_k, x_k, acc)
  /// over k in order.
  void (*forward)(const PackedMatrix& w, const ActRows& x, size_t m0, size_t m1, size_t b0, size_t b1,
                  const LinearOutput& to);
  /// cols values (a multiple of 32) -> cols / 32 groups.
  void (*quantize_row)(const float* x, size_t cols, ActGroup* out);
  /// out = silu(gate) * up.
  void (*silu_mul)(const float* gate, const float* up, size_t n, float* out);
};

}  // namespace octavo
