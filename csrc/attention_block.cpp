#include "attention_block.hpp"

#include <stdexcept>
#include <string>

#include "errors.hpp"

namespace octavo {
namespace {

enum BlockSlot : int { kSlotQkv = kSlotAttention + 8, kSlotOut };

void expect(const TensorView& tensor, size_t rows, size_t cols) {
  if (tensor.rows != rows || tensor.cols != cols)
    throw LoadError("tensor " + tensor.name + " is " + std::to_string(tensor.rows) + " x " +
                    std::to_string(tensor.cols) + ", the model's heads need " + std::to_string(rows) + " x " +
                    std::to_string(cols));
}

void expect(std::span<const float> norm, size_t n, const char* name, const TensorView& tensor) {
  if (norm.size() != n)
    throw LoadError(std::string(name) + " beside tensor " + tensor.name + " has " + std::to_string(norm.size()) +
                    " values, not " + std::to_string(n));
}

}  // namespace

AttentionBlock::AttentionBlock(Context& context, const CacheLayout& cache, size_t layer, size_t model_layer,
                               float eps, float softmax_scale, std::span<const float> norm, const TensorView& q,
                               const TensorView& k, const TensorView& v, const TensorView& o,
                               std::span<const float> bias, std::span<const float> q_norm,
                               std::span<const float> k_norm)
    : cache_(&cache),
      layer_(layer),
      model_layer_(model_layer),
      eps_(eps),
      softmax_scale_(softmax_scale),
      norm_(norm.begin(), norm.end()),
      q_norm_(q_norm.begin(), q_norm.end()),
      k_norm_(k_norm.begin(), k_norm.end()),
      qkv_(context, std::vector<TensorView>{q, k, v}, bias),
      o_(context, std::vector<TensorView>{o}) {
  const size_t d = cache.shape.plane.head_dim, kv = cache.shape.plane.n_heads * d, width = kv * cache.shape.group;
  if (layer >= cache.open.layers.size())
    throw std::invalid_argument("layer " + std::to_string(layer) + " is beyond the cache's " +
                                std::to_string(cache.open.layers.size()));
  expect(q, width, norm.size());
  expect(k, kv, norm.size());
  expect(v, kv, norm.size());
  expect(o, norm.size(), width);
  if (!q_norm.empty()) expect(q_norm, d, "q_norm", q);
  if (!k_norm.empty()) expect(k_norm, d, "k_norm", k);
}

void AttentionBlock::run(Context& context, const Step& step, float* hidden) const {
  if (&step.cache() != cache_) throw std::invalid_argument("the step belongs to another model's cache");
  const size_t n = step.n_rows(), d_model = cols();
  if (n == 0) return;
  const Norm norm{norm_.data(), eps_};
  float* qkv = context.scratch.take<float>(kSlotQkv, n * qkv_.rows());
  float* out = context.scratch.take<float>(kSlotOut, n * o_.cols());
  linear_forward(context, qkv_, linear_input(context, qkv_, hidden, d_model, n, &norm), n, qkv, qkv_.rows(), false);
  attend(context, step,
         {layer_, model_layer_, eps_, softmax_scale_, q_norm_.empty() ? nullptr : q_norm_.data(),
          k_norm_.empty() ? nullptr : k_norm_.data()},
         qkv, out);
  linear_forward(context, o_, linear_input(context, o_, out, o_.cols(), n, nullptr), n, hidden, d_model, true);
}

}  // namespace octavo
