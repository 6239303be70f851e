// Sampling without a sort. Filters keep a run of the likeliest tokens, that is all logits above a threshold and the
// first few that equal it; so each filter only looks for its threshold. The draw then walks the kept tokens in order of
// their ids and takes the first at which the sum of weights exceeds uniform * total.
//
// The order of sums, the same for every number of rows and threads: without filters, and for top_p's total over the
// whole vocabulary, weights are summed in blocks of kSampleBlock (see SamplingKernels::weight_sum) and the blocks from
// left to right; kept tokens, and the tokens of the block in which the draw falls, are summed from left to right; those
// of top_p's bins are summed from left to right, and added up from the likeliest. All of these in double.
#include "sampling.hpp"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <functional>
#include <limits>

namespace octavo {
namespace {

constexpr size_t kAll = std::numeric_limits<size_t>::max();

size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }

/// Logits above `value`, and the first `ties` that equal it.
struct Threshold {
  float value;
  size_t ties;
};

/// Tokens that may be kept, in the order of their ids; memory for a whole vocabulary.
struct Candidates {
  float* x;
  float* weight;
  int32_t* id;
  size_t n;

  void keep(Threshold threshold) {
    size_t kept = 0, ties = 0;
    for (size_t i = 0; i < n; ++i) {
      if (x[i] < threshold.value || (x[i] == threshold.value && ties++ >= threshold.ties)) continue;
      x[kept] = x[i], weight[kept] = weight[i], id[kept] = id[i];
      ++kept;
    }
    n = kept;
  }
};

/// The k-th largest of n values, 1 <= k <= n. Reorders them.
float kth_largest(float* values, size_t n, size_t k) {
  std::nth_element(values, values + (k - 1), values + n, std::greater<float>());
  return values[k - 1];
}

/// Threshold of the k largest, k < c.n. Overwrites the weights.
Threshold top_k_threshold(const Candidates& c, size_t k) {
  std::copy(c.x, c.x + c.n, c.weight);
  const float value = kth_largest(c.weight, c.n, k);
  const auto above = static_cast<size_t>(std::count_if(c.x, c.x + c.n, [=](float x) { return x > value; }));
  return {value, k - above};
}

/// Threshold of the smallest run of largest logits whose weights sum to `target`, or of all. Sums weights in bins of
/// logits, goes on in the bin in which the sum reaches the target, and so on until the bin holds one value.
Threshold top_p_threshold(const Candidates& c, double target) {
  constexpr int kBins = 1024;
  struct Bin {
    double sum;
    float low, high;
  };
  const auto [least, most] = std::minmax_element(c.x, c.x + c.n);
  float low = *least, high = *most;
  double above = 0;  // weight of all logits larger than `high`
  while (low < high) {
    Bin bins[kBins];
    std::fill(bins, bins + kBins, Bin{0, high, low});
    const double top = high, per_bin = kBins / (top - static_cast<double>(low));
    for (size_t i = 0; i < c.n; ++i) {
      const float x = c.x[i];
      if (x < low || x > high) continue;
      Bin& bin = bins[std::min(static_cast<int>((top - static_cast<double>(x)) * per_bin), kBins - 1)];
      bin.sum += static_cast<double>(c.weight[i]);
      bin.low = std::min(bin.low, x), bin.high = std::max(bin.high, x);
    }
    const Bin* bin = bins;
    while (bin != bins + kBins && above + bin->sum < target) above += (bin++)->sum;
    if (bin == bins + kBins) return {low, kAll};
    low = bin->low, high = bin->high;
  }
  const double weight = c.weight[std::find(c.x, c.x + c.n, low) - c.x];
  const double ties = std::ceil((target - above) / weight);
  return {low, ties < static_cast<double>(c.n) ? std::max(static_cast<size_t>(ties), size_t{1}) : kAll};
}

/// The smallest float of at least `limit`, so that comparing floats with it compares them with `limit`.
float ceil_to_float(double limit) {
  if (limit <= -FLT_MAX) return -FLT_MAX;
  const auto f = static_cast<float>(limit);
  return static_cast<double>(f) < limit ? std::nextafter(f, FLT_MAX) : f;
}

/// The first i at which weight[0] + ... + weight[i] exceeds `target`; where rounding leaves none, the last with weight.
size_t walk(const float* weight, size_t n, double target) {
  double sum = 0;
  size_t last = 0;
  for (size_t i = 0; i < n; ++i) {
    if (weight[i] > 0) last = i;
    sum += static_cast<double>(weight[i]);
    if (sum > target) return i;
  }
  return last;
}

/// One row's logits, and what the passes over all of them found.
struct Row {
  const float* x;
  size_t vocab;
  const float* maxima;
  const double* block_sums;  ///< where `sums_all`
  float top;
  float scale;
  double temperature, top_p, min_p, uniform;
  size_t top_k;  ///< vocab where all are kept

  bool is_finite() const { return std::isfinite(top); }
  bool is_greedy() const { return temperature == 0; }
  bool has_top_k() const { return top_k < vocab; }
  bool has_filter() const { return has_top_k() || top_p < 1 || min_p > 0; }
  /// Whether weights of the whole vocabulary are summed.
  bool sums_all() const { return is_finite() && !is_greedy() && !has_top_k() && (top_p < 1 || !has_filter()); }
  size_t blocks() const { return ceil_div(vocab, kSampleBlock); }
  size_t groups() const { return ceil_div(vocab, kSampleGroup); }
  float min_p_cut() const {
    return min_p > 0 ? ceil_to_float(static_cast<double>(top) + temperature * std::log(min_p)) : -FLT_MAX;
  }
  double total() const {
    double sum = 0;
    for (size_t b = 0; b < blocks(); ++b) sum += block_sums[b];
    return sum;
  }
};

size_t argmax(const Row& row) {
  const auto group = static_cast<size_t>(std::find(row.maxima, row.maxima + row.groups(), row.top) - row.maxima);
  const float* first = row.x + group * kSampleGroup;
  return static_cast<size_t>(std::find(first, row.x + row.vocab, row.top) - row.x);
}

size_t draw_from_all(const SamplingKernels& kernels, const Row& row, float* weight) {
  double target = row.uniform * row.total();
  size_t block = 0;
  while (block + 1 < row.blocks() && row.block_sums[block] <= target) target -= row.block_sums[block++];
  // Rounding may carry the target past a last block without weight.
  while (block > 0 && row.block_sums[block] == 0) target = row.block_sums[--block];
  const size_t first = block * kSampleBlock, n = std::min(kSampleBlock, row.vocab - first);
  kernels.weights(row.x + first, n, row.top, row.scale, weight);
  return first + walk(weight, n, target);
}

/// A lower bound of every logit that the first of the row's filters keeps. Overwrites `spare`, of groups() values.
float candidate_cut(const Row& row, double total, float* spare) {
  if (row.has_top_k()) {  // at least k logits reach the k-th largest of the groups' maxima
    if (row.top_k > row.groups()) return -FLT_MAX;
    std::copy(row.maxima, row.maxima + row.groups(), spare);
    return std::max(kth_largest(spare, row.groups(), row.top_k), -FLT_MAX);
  }
  const float cut = row.min_p_cut();
  if (row.top_p >= 1) return cut;
  // Logits below this have less than (1 - top_p) of the weight together, were it all the vocabulary. The margin is far
  // above what rounding does.
  const double share = (1 - row.top_p) * total / static_cast<double>(row.vocab);
  const double limit = static_cast<double>(row.top) + row.temperature * (std::log(share) - 1e-3);
  return std::max(cut, ceil_to_float(limit - 1e-6 * (std::abs(row.top) + std::abs(limit))));
}

size_t draw_filtered(const SamplingKernels& kernels, const Row& row, Candidates c) {
  double total = row.sums_all() ? row.total() : 0;
  c.n = kernels.gather(row.x, row.vocab, row.maxima, candidate_cut(row, total, c.weight), c.x, c.id);
  if (row.top_k < c.n) c.keep(top_k_threshold(c, row.top_k));
  kernels.weights(c.x, c.n, row.top, row.scale, c.weight);
  if (row.top_p < 1) {
    if (row.has_top_k()) {
      for (size_t i = 0; i < c.n; ++i) total += static_cast<double>(c.weight[i]);
    }
    c.keep(top_p_threshold(c, row.top_p * total));
  }
  if (row.min_p > 0) c.keep({row.min_p_cut(), kAll});
  double kept = 0;
  for (size_t i = 0; i < c.n; ++i) kept += static_cast<double>(c.weight[i]);
  return static_cast<size_t>(c.id[walk(c.weight, c.n, row.uniform * kept)]);
}

float largest(const float* maxima, size_t n) {
  float top = -std::numeric_limits<float>::infinity();
  for (size_t i = 0; i < n; ++i) {
    if (std::isnan(maxima[i])) return maxima[i];
    top = std::max(top, maxima[i]);
  }
  return top;
}

}  // namespace

void sample(Context& context, const float* logits, size_t n, size_t vocab, const SampleRows& rows, int32_t* out) {
  const SamplingKernels& kernels = context.kernels.sampling;
  const size_t blocks = ceil_div(vocab, kSampleBlock), groups = ceil_div(vocab, kSampleGroup);
  // Candidates of the rows that are drawn from at a time: a place for each row, or for each thread if those are fewer.
  const size_t places = std::min(n, static_cast<size_t>(context.pool.threads()));
  float* maxima = context.scratch.take<float>(kSlotSampling, n * groups);
  double* sums = context.scratch.take<double>(kSlotSampling + 1, n * blocks);
  Row* state = context.scratch.take<Row>(kSlotSampling + 2, n);
  float* values = context.scratch.take<float>(kSlotSampling + 3, places * vocab);
  float* weights = context.scratch.take<float>(kSlotSampling + 4, places * vocab);
  int32_t* ids = context.scratch.take<int32_t>(kSlotSampling + 5, places * vocab);

  const auto each_block = [&](auto&& f) {
    context.pool.parallel_for(n * blocks, [&](size_t task, int) {
      const size_t i = task / blocks, b = task % blocks, first = b * kSampleBlock;
      f(i, b, logits + i * vocab + first, std::min(kSampleBlock, vocab - first));
    });
  };
  each_block([&](size_t i, size_t b, const float* x, size_t count) {
    kernels.maxima(x, count, maxima + i * groups + b * (kSampleBlock / kSampleGroup));
  });
  bool any_sums = false;
  for (size_t i = 0; i < n; ++i) {
    const double temperature = rows.temperature[i];
    const float* tops = maxima + i * groups;
    state[i] = {
        .x = logits + i * vocab,
        .vocab = vocab,
        .maxima = tops,
        .block_sums = sums + i * blocks,
        .top = largest(tops, groups),
        // Finite even where a temperature is next to nothing: the likeliest token's 0 times it stays 0.
        .scale = static_cast<float>(std::min(1.4426950408889634 / temperature, static_cast<double>(FLT_MAX))),
        .temperature = temperature,
        .top_p = rows.top_p[i],
        .min_p = rows.min_p[i],
        .uniform = rows.uniform[i],
        .top_k = rows.top_k[i] > 0 ? std::min(static_cast<size_t>(rows.top_k[i]), vocab) : vocab,
    };
    any_sums = any_sums || state[i].sums_all();
  }
  if (any_sums)
    each_block([&](size_t i, size_t b, const float* x, size_t count) {
      if (state[i].sums_all()) sums[i * blocks + b] = kernels.weight_sum(x, count, state[i].top, state[i].scale);
    });
  context.pool.parallel_for(n, [&](size_t i, int thread) {
    const Row& row = state[i];
    const size_t own = (places == n ? i : static_cast<size_t>(thread)) * vocab;
    if (!row.is_finite())
      out[i] = -1;
    else if (row.is_greedy())
      out[i] = static_cast<int32_t>(argmax(row));
    else if (row.has_filter())
      out[i] = static_cast<int32_t>(draw_filtered(kernels, row, {values + own, weights + own, ids + own, 0}));
    else
      out[i] = static_cast<int32_t>(draw_from_all(kernels, row, weights + own));
  });
}

}  // namespace octavo
