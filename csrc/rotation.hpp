// Orthonormal Walsh-Hadamard transform over head_dim, as octavo.codecs.rotation defines it: the same operations in the
// same order, so the same bits. Kernel sources only, as simd.hpp.
#pragma once

#include "simd.hpp"

namespace octavo::OCTAVO_ISA {

/// The largest power of two that divides head_dim: the transform is block-diagonal in blocks of this many channels.
OCTAVO_INLINE size_t rotation_block(size_t head_dim) { return head_dim & (~head_dim + 1); }

OCTAVO_INLINE f32x8 rotation_norm(size_t block) {
  return set1(static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(block))));
}

/// The steps h = 1, 2 and 4 within a vector: lane i becomes x[i] + x[i ^ h] where bit h of i is clear, x[i ^ h] - x[i]
/// where it is set (as -x[i] + x[i ^ h], which rounds the same).
OCTAVO_INLINE f32x8 rotate_lanes(f32x8 x) {
  constexpr int32_t n = INT32_MIN;
  const i32x8 minus1 = {0, n, 0, n, 0, n, 0, n}, minus2 = {0, 0, n, n, 0, 0, n, n}, minus4 = {0, 0, 0, 0, n, n, n, n};
  x = __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6) + bits<f32x8>(bits<i32x8>(x) ^ minus1);
  x = __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5) + bits<f32x8>(bits<i32x8>(x) ^ minus2);
  return __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3) + bits<f32x8>(bits<i32x8>(x) ^ minus4);
}

/// from[0..head_dim) to x, channels in lanes. head_dim is a multiple of 8; from may be x.
OCTAVO_INLINE void rotate_row(const float* from, float* x, size_t head_dim) {
  const size_t block = rotation_block(head_dim);
  const f32x8 norm = rotation_norm(block);
  for (size_t i = 0; i < head_dim; i += 8) store(x + i, rotate_lanes(loadf(from + i)));
  for (size_t h = 8; h < block; h *= 2)
    for (size_t i = 0; i < head_dim; i += 2 * h)
      for (size_t j = i; j < i + h; j += 8) {
        const f32x8 a = loadf(x + j), b = loadf(x + j + h);
        store(x + j, a + b);
        store(x + j + h, a - b);
      }
  for (size_t i = 0; i < head_dim; i += 8) store(x + i, loadf(x + i) * norm);
}

/// from [head_dim][n] to x, channels in rows. n is a multiple of 8, head_dim of 2; from may be x.
OCTAVO_INLINE void rotate_columns(const float* from, float* x, size_t head_dim, size_t n) {
  const size_t block = rotation_block(head_dim);
  const f32x8 norm = rotation_norm(block);
  for (size_t h = 1; h < block; h *= 2) {
    for (size_t i = 0; i < head_dim; i += 2 * h)
      for (size_t j = i * n; j < (i + h) * n; j += 8) {
        const f32x8 a = loadf(from + j), b = loadf(from + j + h * n);
        store(x + j, a + b);
        store(x + j + h * n, a - b);
      }
    from = x;
  }
  for (size_t j = 0; j < head_dim * n; j += 8) store(x + j, loadf(x + j) * norm);
}

}  // namespace octavo::OCTAVO_ISA
