// Linear layers over stored weights: packing at load, and products with rows of hidden states.
//
// The result of a row depends on the row alone: not on how many rows a call has, nor on where it stands among them, nor on
// threads. LinearKernels::forward says what is computed for an output; all that this file adds is which task does it.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "context.hpp"
#include "linear_types.hpp"

namespace octavo {

/// A stored matrix: bytes as GGUF lays them out, row after row.
struct TensorView {
  std::string name;  // for messages
  TensorType type;
  size_t rows, cols;
  const uint8_t* data;
  size_t bytes;
  const int32_t* row_order = nullptr;  // if set, logical row i is stored row row_order[i]

  const uint8_t* row(size_t i) const;
};

/// Throws UnsupportedError for a type that no kernel reads.
TensorType parse_tensor_type(std::string_view name, std::string_view tensor);
const char* tensor_type_name(TensorType type);
/// Bytes of one stored row.
size_t stored_row_bytes(TensorType type, size_t cols);
inline bool is_float(TensorType type) { return type <= TensorType::BF16; }

/// Throws LoadError unless shape, size and row order agree and (in parallel) every scale and float weight is finite.
void check_tensor(Context& context, const TensorView& tensor);

/// Stored row i as floats.
void dequantize_row(const TensorView& tensor, size_t i, float* out);

/// Blocks b0..b1 in kernel order. `out` has (b1 - b0) * packed_block_bytes bytes, all zero.
void pack_blocks(const TensorView& tensor, size_t b0, size_t b1, uint8_t* out);
size_t packed_block_bytes(TensorType type, size_t cols);

/// RMSNorm before a product.
struct Norm {
  const float* weight;
  float eps;
};

/// One or more matrices with the same inputs, stacked by rows (query, key and value; types may differ). Packs copies; the
/// views may go when the constructor returns.
class Linear {
 public:
  /// Throws LoadError or UnsupportedError naming the tensor, std::invalid_argument on a bias of the wrong length.
  Linear(Context& context, std::span<const TensorView> stack, std::span<const float> bias = {});
  Linear(const Linear&) = delete;
  Linear(Linear&&) = default;

  size_t rows() const { return rows_; }
  size_t cols() const { return cols_; }
  bool reads_groups() const { return reads_groups_; }
  bool reads_float() const { return reads_float_; }
  size_t packed_bytes() const;

 private:
  friend void linear_forward(Context&, const Linear&, const ActRows&, size_t, float*, size_t, bool);
  friend class Mlp;
  struct Piece {
    PackedMatrix matrix;
    std::shared_ptr<uint8_t> data;
    size_t bytes;
    size_t first_row, first_block;
  };
  std::vector<Piece> pieces_;
  std::vector<float> bias_;
  size_t rows_ = 0, cols_ = 0, blocks_ = 0;
  bool reads_groups_ = false, reads_float_ = false;
};

/// Rows of x (n rows, `stride` floats apart), normalized if `norm` is set, as `linear` reads them. The result lies in
/// scratch slot kSlotActivations, until the next call.
ActRows linear_input(Context& context, const Linear& linear, const float* x, size_t stride, size_t n, const Norm* norm);

/// out[m * stride + r] = bias[r] + (x W^T)[m, r], or that added to what is there. n rows.
void linear_forward(Context& context, const Linear& linear, const ActRows& x, size_t n, float* out, size_t stride,
                    bool add);

/// Rows of activations that a task takes at a time, so that they stay in the second-level cache beside the weights.
size_t row_tile(size_t n, size_t cols);

}  // namespace octavo
