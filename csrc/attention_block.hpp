// The attention block of one layer: everything between two residual adds.
#pragma once

#include <span>
#include <vector>

#include "attention.hpp"
#include "linear.hpp"

namespace octavo {

/// hidden += W_o attention(rope(W_qkv norm(hidden) + bias)), keys and values into the step's pages.
class AttentionBlock {
 public:
  /// q_norm and k_norm, [head_dim] or empty: RMSNorm of each head, before the rotary embedding.
  /// bias: of q, k and v in a row, or empty. layer: within the cache's group; model_layer: its number in errors. Throws
  /// LoadError where shapes do not fit cache.shape.
  AttentionBlock(Context& context, const CacheLayout& cache, size_t layer, size_t model_layer, float eps, float softmax_scale,
                 std::span<const float> norm, const TensorView& q, const TensorView& k, const TensorView& v,
                 const TensorView& o, std::span<const float> bias, std::span<const float> q_norm,
                 std::span<const float> k_norm);

  size_t cols() const { return qkv_.cols(); }
  size_t packed_bytes() const { return qkv_.packed_bytes() + o_.packed_bytes(); }

  /// hidden [step.n_rows(), cols()]. Throws CodecRangeError where a page cannot be sealed or read,
  /// std::invalid_argument where the step is of another cache.
  void run(Context& context, const Step& step, float* hidden) const;

 private:
  const CacheLayout* cache_;
  size_t layer_, model_layer_;
  float eps_, softmax_scale_;
  std::vector<float> norm_, q_norm_, k_norm_;
  Linear qkv_, o_;
};

}  // namespace octavo
