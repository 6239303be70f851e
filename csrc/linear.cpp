#include "linear.hpp"

#include <algorithm>

#include "errors.hpp"

namespace octavo {
namespace {

constexpr size_t kTaskBytes = 8192;              // weights per task at least, so that forking costs less than it gives
constexpr size_t kTileBytes = size_t{1} << 17;   // activations per task at most: a quarter of a common second-level cache
constexpr size_t kRowsAtOnce = 4;                // rows that the kernels take together

size_t divide_up(size_t a, size_t b) { return (a + b - 1) / b; }

}  // namespace

size_t row_tile(size_t n, size_t cols) {
  const size_t row_bytes = cols / kGroup * sizeof(ActGroup) + 1;
  const size_t fits = std::clamp(kTileBytes / row_bytes, kRowsAtOnce, size_t{64}) / kRowsAtOnce * kRowsAtOnce;
  return std::min(n, fits);
}

Linear::Linear(Context& context, std::span<const TensorView> stack, std::span<const float> bias)
    : bias_(bias.begin(), bias.end()) {
  if (stack.empty()) throw std::invalid_argument("a linear layer needs at least one tensor");
  cols_ = stack[0].cols;
  for (const TensorView& t : stack) {
    check_tensor(context, t);
    if (t.cols != cols_)
      throw LoadError("tensor " + t.name + " has " + std::to_string(t.cols) + " columns, but " + stack[0].name +
                      ", with which it is stacked, has " + std::to_string(cols_));
    const size_t blocks = divide_up(t.rows, kBlockRows), block_bytes = packed_block_bytes(t.type, t.cols);
    const size_t bytes = blocks * block_bytes;
    Piece piece{{t.type, t.rows, t.cols, block_bytes, nullptr}, context.weights.take(bytes), bytes, rows_, blocks_};
    uint8_t* data = piece.data.get();
    piece.matrix.data = data;
    const size_t chunk = 1 + (size_t{1} << 17) / block_bytes;
    context.pool.parallel_for(divide_up(blocks, chunk), [&](size_t task, int) {
      const size_t b0 = task * chunk;
      pack_blocks(t, b0, std::min(blocks, b0 + chunk), data + b0 * block_bytes);
    });
    pieces_.push_back(std::move(piece));
    rows_ += t.rows;
    blocks_ += blocks;
    (is_float(t.type) ? reads_float_ : reads_groups_) = true;
  }
  if (!bias_.empty() && bias_.size() != rows_)
    throw std::invalid_argument("bias has " + std::to_string(bias_.size()) + " values for " + std::to_string(rows_) +
                                " rows");
}

size_t Linear::packed_bytes() const {
  size_t sum = 0;
  for (const Piece& p : pieces_) sum += p.bytes;
  return sum;
}

ActRows linear_input(Context& context, const Linear& linear, const float* x, size_t stride, size_t n,
                     const Norm* norm) {
  const size_t cols = linear.cols(), groups = linear.reads_groups() ? cols / kGroup : 0;
  const bool keep_float = linear.reads_float() && norm != nullptr;
  const bool normed_float = norm != nullptr && !keep_float;  // needed only until it is quantized
  const size_t threads = static_cast<size_t>(context.pool.threads());
  // One slot: groups of all rows, then float rows, or one float row per thread.
  const size_t float_rows = keep_float ? n : normed_float ? threads : 0;
  uint8_t* memory = context.scratch.take<uint8_t>(kSlotActivations, n * groups * sizeof(ActGroup) + float_rows * cols * 4);
  auto* q = reinterpret_cast<ActGroup*>(memory);
  auto* rows = reinterpret_cast<float*>(memory + n * groups * sizeof(ActGroup));
  const KernelTable& kernels = context.kernels;

  const size_t chunk = 1 + 8192 / cols;
  context.pool.parallel_for(divide_up(n, chunk), [&](size_t task, int thread) {
    for (size_t m = task * chunk; m < std::min(n, (task + 1) * chunk); ++m) {
      const float* row = x + m * stride;
      if (norm != nullptr) {
        float* to = rows + (keep_float ? m : static_cast<size_t>(thread)) * cols;
        kernels.math.rms_norm(row, norm->weight, norm->eps, cols, to);
        row = to;
      }
      if (groups != 0) kernels.linear.quantize_row(row, cols, q + m * groups);
    }
  });
  ActRows result{groups != 0 ? q : nullptr, groups, nullptr, 0};
  if (linear.reads_float()) {
    result.x = keep_float ? rows : x;
    result.x_stride = keep_float ? cols : stride;
  }
  return result;
}

void linear_forward(Context& context, const Linear& linear, const ActRows& x, size_t n, float* out, size_t stride,
                    bool add) {
  if (n == 0) return;
  const size_t tile = row_tile(n, linear.cols_), tiles = divide_up(n, tile);
  const size_t block_bytes = linear.packed_bytes() / linear.blocks_;
  // About eight tasks per thread, so that a late thread costs little; whole pairs of blocks, as kernels take them.
  const size_t wanted = divide_up(8 * static_cast<size_t>(context.pool.threads()), tiles);
  size_t chunk = std::max(linear.blocks_ / wanted, kTaskBytes / (block_bytes * tile) + 1);
  chunk = divide_up(chunk, 2) * 2;
  const size_t chunks = divide_up(linear.blocks_, chunk);
  const auto forward = context.kernels.linear.forward;
  const float* bias = linear.bias_.empty() ? nullptr : linear.bias_.data();

  context.pool.parallel_for(chunks * tiles, [&](size_t task, int) {
    const size_t first = task / tiles * chunk, last = std::min(first + chunk, linear.blocks_);
    const size_t m0 = task % tiles * tile, m1 = std::min(n, m0 + tile);
    for (const Linear::Piece& piece : linear.pieces_) {
      const size_t end = piece.first_block + divide_up(piece.matrix.rows, kBlockRows);
      const size_t b0 = std::max(first, piece.first_block), b1 = std::min(last, end);
      if (b0 >= b1) continue;
      const size_t row = piece.first_row + (b0 - piece.first_block) * kBlockRows;
      forward(piece.matrix, x, m0, m1, b0 - piece.first_block, b1 - piece.first_block,
              {out + m0 * stride + row, stride, bias == nullptr ? nullptr : bias + row, add});
    }
  });
}

}  // namespace octavo
