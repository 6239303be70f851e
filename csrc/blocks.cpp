#include "blocks.hpp"

#include <algorithm>
#include <cstring>

#include "errors.hpp"

namespace octavo {
namespace {

constexpr size_t kUnitBlocks = kGroup / kBlockRows;  // blocks of gate and of up that give one group of the MLP's middle
constexpr size_t kMaxTile = 64;

std::vector<float> checked_norm(std::span<const float> norm, const TensorView& weight) {
  if (norm.size() != weight.cols)
    throw LoadError("the norm before tensor " + weight.name + " has " + std::to_string(norm.size()) +
                    " values, the tensor " + std::to_string(weight.cols) + " columns");
  return {norm.begin(), norm.end()};
}

}  // namespace

Embedding::Embedding(Context& context, const TensorView& table) : table_(table) { check_tensor(context, table); }

void Embedding::lookup(Context& context, const int32_t* tokens, size_t n, float* out) const {
  for (size_t i = 0; i < n; ++i)
    if (tokens[i] < 0 || static_cast<size_t>(tokens[i]) >= table_.rows)
      throw std::invalid_argument("token " + std::to_string(tokens[i]) + " is outside the vocabulary of " +
                                  std::to_string(table_.rows));
  const size_t chunk = 1 + 16384 / table_.cols;
  context.pool.parallel_for((n + chunk - 1) / chunk, [&](size_t task, int) {
    for (size_t i = task * chunk; i < std::min(n, (task + 1) * chunk); ++i)
      dequantize_row(table_, static_cast<size_t>(tokens[i]), out + i * table_.cols);
  });
}

Mlp::Mlp(Context& context, std::span<const float> norm, float eps, const TensorView& gate, const TensorView& up,
         const TensorView& down)
    : norm_(checked_norm(norm, gate)),
      eps_(eps),
      gate_up_(context, std::vector<TensorView>{gate, up}),
      down_(context, std::vector<TensorView>{down}) {
  if (gate.rows != up.rows || down.cols != gate.rows || down.rows != gate.cols)
    throw LoadError("tensors " + gate.name + ", " + up.name + " and " + down.name + " do not fit together");
}

void Mlp::run(Context& context, float* hidden, size_t n) const {
  if (n == 0) return;
  const size_t d = norm_.size(), width = down_.cols();
  const Norm norm{norm_.data(), eps_};
  const ActRows x = linear_input(context, gate_up_, hidden, d, n, &norm);

  // The middle goes straight into the form that `down` reads: a unit of 32 outputs is one group of activations.
  const bool to_groups = down_.reads_groups();
  const size_t units = (width + kGroup - 1) / kGroup;
  uint8_t* memory = context.scratch.take<uint8_t>(kSlotMlp, n * (to_groups ? units * sizeof(ActGroup) : width * sizeof(float)));
  auto* groups = reinterpret_cast<ActGroup*>(memory);
  auto* middle = reinterpret_cast<float*>(memory);

  const LinearKernels& kernels = context.kernels.linear;
  const PackedMatrix& gate = gate_up_.pieces_[0].matrix;
  const PackedMatrix& up = gate_up_.pieces_[1].matrix;
  const size_t blocks = (width + kBlockRows - 1) / kBlockRows;
  const size_t tile = row_tile(n, d), tiles = (n + tile - 1) / tile;
  const size_t wanted = (8 * static_cast<size_t>(context.pool.threads()) + tiles - 1) / tiles;
  const size_t chunk = std::max(units / wanted, size_t{1});
  const size_t chunks = (units + chunk - 1) / chunk;

  context.pool.parallel_for(chunks * tiles, [&](size_t task, int) {
    const size_t m0 = task % tiles * tile, m1 = std::min(n, m0 + tile);
    float gated[kMaxTile * kGroup], raised[kMaxTile * kGroup];
    for (size_t u = task / tiles * chunk; u < std::min(units, (task / tiles + 1) * chunk); ++u) {
      const size_t b0 = u * kUnitBlocks, b1 = std::min(blocks, b0 + kUnitBlocks);
      const size_t count = std::min(kGroup, width - u * kGroup);
      kernels.forward(gate, x, m0, m1, b0, b1, {gated, kGroup, nullptr, false});
      kernels.forward(up, x, m0, m1, b0, b1, {raised, kGroup, nullptr, false});
      for (size_t m = m0; m < m1; ++m) {
        float* row = gated + (m - m0) * kGroup;
        kernels.silu_mul(row, raised + (m - m0) * kGroup, count, row);
        if (to_groups)
          kernels.quantize_row(row, kGroup, groups + m * units + u);
        else
          std::memcpy(middle + m * width + u * kGroup, row, count * sizeof(float));
      }
    }
  });
  const ActRows y = to_groups ? ActRows{groups, units, nullptr, 0} : ActRows{nullptr, 0, middle, width};
  linear_forward(context, down_, y, n, hidden, d, true);
}

Head::Head(Context& context, std::span<const float> norm, float eps, const TensorView& weight)
    : norm_(checked_norm(norm, weight)), eps_(eps), linear_(context, std::vector<TensorView>{weight}) {}

void Head::run(Context& context, const float* hidden, size_t hidden_rows, const int32_t* rows, size_t n,
               float* out) const {
  const size_t d = norm_.size();
  float* picked = context.scratch.take<float>(kSlotHidden, n * d);
  for (size_t i = 0; i < n; ++i) {
    if (rows[i] < 0 || static_cast<size_t>(rows[i]) >= hidden_rows)
      throw std::invalid_argument("row " + std::to_string(rows[i]) + " is outside the " + std::to_string(hidden_rows) +
                                  " hidden states");
    std::memcpy(picked + i * d, hidden + static_cast<size_t>(rows[i]) * d, d * sizeof(float));
  }
  const Norm norm{norm_.data(), eps_};
  linear_forward(context, linear_, linear_input(context, linear_, picked, d, n, &norm), n, out, linear_.rows(), false);
}

void log_softmax(Context& context, const float* x, size_t n, size_t cols, float* out) {
  context.pool.parallel_for(
      n, [&](size_t m, int) { context.kernels.math.log_softmax(x + m * cols, cols, out + m * cols); });
}

}  // namespace octavo
