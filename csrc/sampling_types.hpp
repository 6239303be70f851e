// What sampling's kernels and their callers agree on. Read by kernel sources too: plain data only.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace octavo {

/// Logits whose largest is kept, so that runs without a candidate are passed over.
inline constexpr size_t kSampleGroup = 64;
/// Logits whose weights are summed by one task. A multiple of kSampleGroup.
inline constexpr size_t kSampleBlock = 4096;

/// A token's weight is 2^((x - top) * scale), with top the row's largest logit and scale = log2(e) / temperature: 1 for
/// the likeliest, 0 below 2^-126. Operations are unfused, so that every instruction set gives the same bits.
struct SamplingKernels {
  /// out[g] = the largest of group g of n logits; but out[0] = NaN where any is. Writes ceil(n / kSampleGroup) values.
  void (*maxima)(const float* x, size_t n, float* out);
  /// out[i] = weight of x[i].
  void (*weights)(const float* x, size_t n, float top, float scale, float* out);
  /// Sum of the weights of n logits: a tree of float32 over each group, the groups' sums in double from left to right.
  double (*weight_sum)(const float* x, size_t n, float top, float scale);
  /// The logits of at least `cut` and their indices, in index order; returns how many. `maxima` is what `maxima` wrote.
  /// `values` and `ids` hold n.
  size_t (*gather)(const float* x, size_t n, const float* maxima, float cut, float* values, int32_t* ids);
};

}  // namespace octavo
