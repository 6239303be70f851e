// Model blocks other than attention: each is one call per step and layer.
#pragma once

#include <memory>
#include <vector>

#include "linear.hpp"

namespace octavo {

/// A table of rows that stays in the mapped file: rows are dequantized as they are looked up.
class Embedding {
 public:
  /// `table.data` and `table.row_order` must outlive the object. Throws LoadError.
  Embedding(Context& context, const TensorView& table);

  size_t rows() const { return table_.rows; }
  size_t cols() const { return table_.cols; }
  /// out [n, cols] = rows of `tokens`. Throws std::invalid_argument on a token outside the table.
  void lookup(Context& context, const int32_t* tokens, size_t n, float* out) const;

 private:
  TensorView table_;
};

/// hidden += W_down (silu(W_gate x) * W_up x), x = norm(hidden).
class Mlp {
 public:
  Mlp(Context& context, std::span<const float> norm, float eps, const TensorView& gate, const TensorView& up,
      const TensorView& down);

  size_t cols() const { return norm_.size(); }
  size_t packed_bytes() const { return gate_up_.packed_bytes() + down_.packed_bytes(); }
  void run(Context& context, float* hidden, size_t n) const;

 private:
  std::vector<float> norm_;
  float eps_;
  Linear gate_up_, down_;
};

/// Logits of chosen rows: W norm(hidden[row]).
class Head {
 public:
  Head(Context& context, std::span<const float> norm, float eps, const TensorView& weight);

  size_t rows() const { return linear_.rows(); }
  size_t cols() const { return norm_.size(); }
  size_t packed_bytes() const { return linear_.packed_bytes(); }
  /// out [n, vocabulary] for hidden[rows[i]], i in 0..n. Throws std::invalid_argument on a row outside 0..hidden_rows.
  void run(Context& context, const float* hidden, size_t hidden_rows, const int32_t* rows, size_t n, float* out) const;

 private:
  std::vector<float> norm_;
  float eps_;
  Linear linear_;
};

/// out[m] = log softmax of x[m], for n rows of `cols`.
void log_softmax(Context& context, const float* x, size_t n, size_t cols, float* out);

}  // namespace octavo
