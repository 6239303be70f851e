#include "attention.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "codecs_plane.hpp"
#include "errors.hpp"

namespace octavo {
namespace {

enum AttentionSlot : int { kSlotQ = kSlotAttention + 1, kSlotExact, kSlotPartials, kSlotThreads };

/// Exact keys and values in one layer.
struct ExactPage {
  float* keys;
  float* values;
};

ExactPage open_page(const CacheLayout& cache, uint8_t* page, size_t layer) {
  const LayerPlanes& planes = cache.open.layers[layer];
  return {reinterpret_cast<float*>(page + planes.key_offset), reinterpret_cast<float*>(page + planes.value_offset)};
}

/// Copies n tokens' keys (rows of n floats, the steps apart) and values (per head, the steps apart).
void copy_tokens(const PlaneShape& shape, size_t n, const ExactPage& from, size_t from_row, size_t from_head,
                 const ExactPage& to, size_t to_row, size_t to_head) {
  const size_t d = shape.head_dim, heads = shape.n_heads;
  for (size_t c = 0; c < heads * d; ++c)
    std::memcpy(to.keys + c * to_row, from.keys + c * from_row, n * sizeof(float));
  for (size_t h = 0; h < heads; ++h)
    std::memcpy(to.values + h * to_head, from.values + h * from_head, n * d * sizeof(float));
}

}  // namespace

void Step::restore() const {
  const PlaneShape& shape = cache_->shape.plane;
  for (size_t i = 0; i < n_direct_; ++i) {
    const OwnPage& own = own_[i];
    if (own.gather == 0) continue;
    for (size_t layer = 0; layer < layer_saved_.size(); ++layer) {
      if (layer_saved_[layer] == 0) continue;
      float* keys = saved_tokens(own, layer);
      copy_tokens(shape, own.gather, {keys, keys + own.gather * shape.n_heads * shape.head_dim}, own.gather,
                  own.gather * shape.head_dim,
                  open_page(*cache_, memory_ + segments_[own.segment].open_offset, layer), shape.page_size,
                  shape.page_size * shape.head_dim);
    }
  }
  std::fill(layer_saved_.begin(), layer_saved_.end(), uint8_t{0});
}

/// The phases of one layer.
class AttentionRun {
 public:
  AttentionRun(Context& context, const Step& step, const AttentionParameters& parameters, const float* qkv, float* out)
      : context_(context), step_(step), p_(parameters), cache_(step.cache()), shape_(cache_.shape), qkv_(qkv),
        out_(out), d_(shape_.plane.head_dim), heads_(shape_.plane.n_heads), group_(shape_.group),
        width_((group_ + 2) * heads_ * d_), head_page_(d_ * shape_.plane.page_size) {
    const size_t rows = step.n_rows();
    bool rotated = false;
    for (const uint8_t f : step.formats_used_) rotated |= cache_.formats[f].layers[p_.layer].key.rotated;
    const size_t q_values = rows * heads_ * group_ * d_;
    q_ = context.scratch.take<float>(kSlotQ, q_values * (rotated ? 2 : 1));
    q_rotated_ = rotated ? q_ + q_values : nullptr;
    exact_ = context.scratch.take<float>(kSlotExact, step.n_scratch_ * 2 * heads_ * head_page_);
    partials_ = context.scratch.take<float>(kSlotPartials, step.n_partials_ * (d_ + 2));
    tile_partial_ = step.tile_rows_ * (d_ + 2);
    split_floats_ = context.kernels.attention.split_scratch(shape_, step.tile_rows_);
    gather_floats_ = step.gather_rows_ * (2 * d_ + d_ + 2);
    // One cache line more, so that two threads never write to the same one.
    thread_floats_ = std::max(split_floats_ + std::max(2 * tile_partial_, gather_floats_), 2 * head_page_);
    thread_floats_ = (thread_floats_ + 31) / 16 * 16;
    threads_ = context.scratch.take<float>(kSlotThreads, thread_floats_ * static_cast<size_t>(context.pool.threads()));
  }

  void run() {
    for (size_t i = 0; i < step_.n_direct_; ++i)
      if (step_.own_[i].gather > 0) gather(step_.own_[i]);
    step_.layer_saved_[p_.layer] = 1;
    try {
      work();
    } catch (...) {
      step_.restore();
      throw;
    }
  }

 private:
  void work() {
    write(0, step_.n_direct_);
    write(step_.n_direct_, step_.own_.size() - step_.n_direct_);
    context_.pool.parallel_for(step_.sealing_.size() * heads_, [&](size_t i, int thread) {
      seal(step_.own_[step_.sealing_[i / heads_]], i % heads_, thread_scratch(thread));
    });
    context_.pool.parallel_for(step_.tasks_.size(),
                               [&](size_t i, int thread) { attend_task(i, thread_scratch(thread)); });
    if (step_.n_partials_ > 0) {
      const auto merge_one = [&](size_t i, int) {
        if (step_.tiles_[i / heads_].in_splits) merge_tile(step_.tiles_[i / heads_], i % heads_);
      };
      const size_t n = step_.tiles_.size() * heads_;
      if (step_.n_partials_ < 1024)
        for (size_t i = 0; i < n; ++i) merge_one(i, 0);
      else
        context_.pool.parallel_for(n, merge_one);
    }
  }

  float* thread_scratch(int thread) const { return threads_ + static_cast<size_t>(thread) * thread_floats_; }

  ExactPage exact_page(const Step::OwnPage& own) const {
    if (own.open_offset >= 0) return open_page(cache_, step_.memory_ + own.open_offset, p_.layer);
    float* page = exact_ + own.scratch * 2 * heads_ * head_page_;
    return {page, page + heads_ * head_page_};
  }

  /// Copies the tokens before the segment from its open page to the scratch page that completes it, and saves them.
  void gather(const Step::OwnPage& own) const {
    const ExactPage from = open_page(cache_, step_.memory_ + step_.segments_[own.segment].open_offset, p_.layer);
    const size_t tokens = shape_.plane.page_size, n = own.gather;
    float* saved = step_.saved_tokens(own, p_.layer);
    copy_tokens(shape_.plane, n, from, tokens, head_page_, exact_page(own), tokens, head_page_);
    copy_tokens(shape_.plane, n, from, tokens, head_page_, {saved, saved + n * heads_ * d_}, n, n * d_);
  }

  /// Writes the rows of own pages [first, first + n).
  void write(size_t first, size_t n) {
    context_.pool.parallel_for(n, [&](size_t i, int) {
      const Step::OwnPage& own = step_.own_[first + i];
      const ExactPage page = exact_page(own);
      RowJob job{};
      job.shape = &shape_;
      job.rope_dim = step_.rope_.dim;
      job.norm_eps = p_.norm_eps;
      job.score_scale = p_.softmax_scale * 1.44269504f;  // 1 / ln 2
      job.q_norm = p_.q_norm;
      job.k_norm = p_.k_norm;
      job.q_step = step_.n_rows() * group_ * d_;
      job.keys = page.keys;
      job.values = page.values;
      for (size_t r = 0; r < own.n_rows; ++r) {
        const size_t row = own.first_row + r, at = step_.position_[row] * (step_.rope_.dim / 2);
        job.qkv = qkv_ + row * width_;
        job.cosine = step_.rope_.cosine + at;
        job.sine = step_.rope_.sine + at;
        job.q = q_ + row * group_ * d_;
        job.q_rotated = q_rotated_ != nullptr ? q_rotated_ + row * group_ * d_ : nullptr;
        job.slot = own.slot + r;
        context_.kernels.attention.prepare_row(job);
      }
    });
  }

  /// The list that a head of a segment reads.
  size_t list_of(size_t segment, size_t head) const {
    const Step::Segment& s = step_.segments_[segment];
    return s.first_list + (s.per_head ? p_.layer * heads_ + head : 0);
  }

  /// Encodes one head of an own page.
  void seal(const Step::OwnPage& own, size_t head, float* scratch) const {
    const ExactPage page = exact_page(own);
    const Step::List& list = step_.lists_[list_of(own.segment, head)];
    const Step::Entry& entry =
        step_.entries_[list.first + list.before + own.page - step_.segments_[own.segment].first_page];
    const LayerPlanes& planes = cache_.formats[entry.format].layers[p_.layer];
    uint8_t* to = step_.memory_ + entry.offset;
    seal_plane(own, planes.key, head, page.keys + head * head_page_, scratch, to + planes.key_offset);
    seal_plane(own, planes.value, head, page.values + head * head_page_, scratch, to + planes.value_offset);
  }

  void seal_plane(const Step::OwnPage& own, Coding coding, size_t head, const float* x, float* scratch,
                  uint8_t* plane) const {
    const CodecStatus status = context_.kernels.codecs.encode_head(shape_.plane, coding, head, x, scratch, plane);
    if (status == CodecStatus::ok) return;
    const size_t tokens = shape_.plane.page_size, first = own.page * tokens;
    std::string where = "tokens " + std::to_string(first) + " to " + std::to_string(first + tokens - 1);
    if (status == CodecStatus::not_finite)
      for (size_t i = 0; i < tokens * d_; ++i)
        if (!std::isfinite(x[i])) {
          where = "token " + std::to_string(first + (coding.role == Role::key ? i % tokens : i / d_));
          break;
        }
    throw CodecRangeError(codec_error(coding, head, status) + " (layer " + std::to_string(p_.model_layer) + ", " + where +
                          ")");
  }

  Partial partial_at(float* p, size_t rows) const { return {p, p + rows, p + 2 * rows}; }

  /// What is read first in a task.
  struct Start {
    const Step::Tile* tile;  // or null
    Step::Reading reading;
    size_t head, split;
  };

  Step::Reading reading_of(const Step::Tile& tile, size_t head) const {
    if (!tile.per_head) return tile.reading;
    const Step::OwnPage& own = step_.own_[tile.own];
    return step_.reading(own, list_of(own.segment, head));
  }

  Start start_of(size_t i) const {
    if (i >= step_.tasks_.size()) return {};
    const Step::Task& task = step_.tasks_[i];
    const Step::Tile& tile = step_.tiles_[step_.members_[task.first]];
    return {&tile, reading_of(tile, task.head), task.head, task.split == Step::kAllSplits ? 0 : task.split};
  }

  void attend_task(size_t i, float* scratch) const {
    const Step::Task& task = step_.tasks_[i];
    const uint32_t* members = step_.members_.data() + task.first;
    // As long as threads keep in step, this one's next task.
    const Start next_task = start_of(i + static_cast<size_t>(context_.pool.threads()));
    if (task.n > 1) return attend_shared(task, members, next_task, scratch);
    const Step::Tile& tile = step_.tiles_[*members];
    const size_t rows = tile.n_rows * group_;
    if (task.split != Step::kAllSplits) {
      attend_split({&tile, tile.reading, task.head, task.split}, own_queries(tile, task.head),
                   tile_partial(tile, task.head, task.split), next_task, scratch);
      return;
    }
    const Partial sum = partial_at(scratch + split_floats_, rows);
    const Partial next = partial_at(scratch + split_floats_ + tile_partial_, rows);
    const Step::Reading reading = reading_of(tile, task.head);
    const auto at = [&](size_t s) { return Start{&tile, reading, task.head, s}; };
    const auto then = [&](size_t s) { return s + 1 < reading.n_splits ? at(s + 1) : next_task; };
    attend_split(at(0), own_queries(tile, task.head), sum, then(0), scratch);
    for (size_t s = 1; s < reading.n_splits; ++s) {
      attend_split(at(s), own_queries(tile, task.head), next, then(s), scratch);
      context_.kernels.attention.merge(sum, next, rows, d_);
    }
    finish(tile, task.head, sum);
  }

  /// A split that several tiles read: its pages are read once, for the rows of all of them.
  void attend_shared(const Step::Task& task, const uint32_t* members, const Start& next, float* scratch) const {
    float* q = scratch + split_floats_;
    float* q_rotated = q + step_.gather_rows_ * d_;
    size_t rows = 0;
    for (uint32_t i = 0; i < task.n; ++i) {
      const Step::Tile& tile = step_.tiles_[members[i]];
      const Queries from = own_queries(tile, task.head);
      std::memcpy(q + rows * d_, from.q, from.n * d_ * sizeof(float));
      if (from.rotated != nullptr) std::memcpy(q_rotated + rows * d_, from.rotated, from.n * d_ * sizeof(float));
      rows += from.n;
    }
    const Partial all = partial_at(q_rotated + step_.gather_rows_ * d_, rows);
    const Step::Tile& any = step_.tiles_[members[0]];
    attend_split({&any, any.reading, task.head, task.split},
                 {q, q_rotated_ != nullptr ? q_rotated : nullptr, rows}, all, next, scratch);
    size_t row = 0;
    for (uint32_t i = 0; i < task.n; ++i) {
      const Step::Tile& tile = step_.tiles_[members[i]];
      const size_t n = tile.n_rows * group_;
      const Partial to = tile_partial(tile, task.head, task.split);
      std::memcpy(to.maximum, all.maximum + row, n * sizeof(float));
      std::memcpy(to.sum, all.sum + row, n * sizeof(float));
      std::memcpy(to.accumulator, all.accumulator + row * d_, n * d_ * sizeof(float));
      row += n;
    }
  }

  Partial tile_partial(const Step::Tile& tile, size_t head, size_t split) const {
    const size_t rows = tile.n_rows * group_;
    return partial_at(partials_ + (tile.partial + (head * tile.reading.n_splits + split) * rows) * (d_ + 2), rows);
  }

  void merge_tile(const Step::Tile& tile, size_t head) const {
    const Partial sum = tile_partial(tile, head, 0);
    for (size_t s = 1; s < tile.reading.n_splits; ++s)
      context_.kernels.attention.merge(sum, tile_partial(tile, head, s), tile.n_rows * group_, d_);
    finish(tile, head, sum);
  }

  void finish(const Step::Tile& tile, size_t head, const Partial& sum) const {
    const size_t token_step = heads_ * group_ * d_;
    context_.kernels.attention.finish(sum, tile.n_rows * group_, d_, group_, token_step,
                                      out_ + tile.first_row * token_step + head * group_ * d_);
  }

  SealedPage sealed_page(const Step::Entry& entry) const {
    const LayerPlanes& planes = cache_.formats[entry.format].layers[p_.layer];
    const uint8_t* memory = step_.memory_ + entry.offset;
    return {memory + planes.key_offset, memory + planes.value_offset, planes.key, planes.value, entry.n_tokens};
  }

  /// Query heads of one KV head.
  struct Queries {
    const float* q;
    const float* rotated;  // or null
    size_t n;
  };

  Queries own_queries(const Step::Tile& tile, size_t head) const {
    const size_t at = (head * step_.n_rows() + tile.first_row) * group_ * d_;
    return {q_ + at, q_rotated_ != nullptr ? q_rotated_ + at : nullptr, tile.n_rows * group_};
  }

  /// The pages are those that the tile reads in this split; `next` is likely to be read after them.
  void attend_split(const Start& at, const Queries& queries, const Partial& to, const Start& next,
                    float* scratch) const {
    const Step::Tile& tile = *at.tile;
    const size_t head = at.head, split = at.split;
    const Step::OwnPage& own = step_.own_[tile.own];
    const auto [first, last] = step_.split_entries(at.reading, split);
    SealedPage pages[kMaxSplitPages];
    SplitJob job{};
    job.shape = &shape_;
    job.head = head;
    job.pages = pages;
    job.n_pages = last - first;
    for (size_t i = 0; i < job.n_pages; ++i) pages[i] = sealed_page(step_.entries_[first + i]);
    SealedPage after;
    if (next.tile != nullptr) {
      const auto [next_first, next_last] = step_.split_entries(next.reading, next.split);
      if (next_first < next_last) {
        after = sealed_page(step_.entries_[next_first]);
        job.next = &after;
        job.next_head = next.head;
      }
    }
    if (split + 1 == at.reading.n_splits) {
      const ExactPage exact = exact_page(own);
      job.own_keys = exact.keys + head * head_page_;
      job.own_values = exact.values + head * head_page_;
      job.own_slot = own.slot + tile.first_row - own.first_row;
    }
    job.n_rows = queries.n;
    job.q = queries.q;
    job.q_rotated = queries.rotated;
    job.scratch = scratch;
    const int bad = context_.kernels.attention.attend_split(job, to);
    if (bad >= 0) {
      const SealedPage& page = pages[bad / 2];
      const Step::Entry& entry = step_.entries_[first + static_cast<size_t>(bad) / 2];
      throw CodecRangeError(codec_error(bad % 2 == 0 ? page.key : page.value, head, CodecStatus::bad_scale) +
                            " (layer " + std::to_string(p_.model_layer) + ", page " +
                            std::to_string(static_cast<size_t>(entry.position) / shape_.plane.page_size) +
                            " of its sequence)");
    }
  }

  Context& context_;
  const Step& step_;
  const AttentionParameters& p_;
  const CacheLayout& cache_;
  const AttentionShape& shape_;
  const float* qkv_;
  float* out_;
  const size_t d_, heads_, group_, width_, head_page_;
  float *q_, *q_rotated_, *exact_, *partials_, *threads_;
  size_t tile_partial_, split_floats_, gather_floats_, thread_floats_;
};

void attend(Context& context, const Step& step, const AttentionParameters& parameters, const float* qkv, float* out) {
  AttentionRun(context, step, parameters, qkv, out).run();
}

}  // namespace octavo
