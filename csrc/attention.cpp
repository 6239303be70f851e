#include "attention.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "codecs_plane.hpp"
#include "errors.hpp"

namespace octavo {
namespace {

constexpr size_t kPlaneAlign = 64;
constexpr size_t kMaxSplitPages = 64;
/// Scores of a tile: half of a small L2 cache.
constexpr size_t kTileScoreBytes = 128 << 10;
/// Partials beyond this are merged as they are made, at the price of fewer tasks.
constexpr size_t kPartialBytes = 64 << 20;

enum AttentionSlot : int { kSlotQ = kSlotAttention + 1, kSlotExact, kSlotPartials, kSlotThreads };

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

std::string text(int64_t n) { return std::to_string(n); }

size_t plane_end(const PlaneShape& shape, const KernelTable& kernels, const LayerPlanes& planes) {
  return std::max(planes.key_offset + kernels.codecs.plane_bytes(shape, planes.key),
                  planes.value_offset + kernels.codecs.plane_bytes(shape, planes.value));
}

}  // namespace

void check_cache(const CacheLayout& cache) {
  check_shape(cache.shape.plane);
  if (cache.shape.group == 0) refuse("a KV head needs at least one query head");
  if (cache.shape.split_pages == 0 || cache.shape.split_pages > kMaxSplitPages)
    refuse("split_pages must be from 1 to " + text(kMaxSplitPages));
}

void check_layout(const CacheLayout& cache, const KernelTable& kernels, const PageLayout& format) {
  if (format.layers.size() != cache.open.layers.size())
    refuse("a page format has " + text(static_cast<int64_t>(format.layers.size())) + " layers, the model " +
           text(static_cast<int64_t>(cache.open.layers.size())));
  for (const LayerPlanes& planes : format.layers) {
    if (planes.key.role != Role::key || planes.value.role != Role::value) refuse("a plane has the wrong role");
    if (planes.key_offset % kPlaneAlign != 0 || planes.value_offset % kPlaneAlign != 0)
      refuse("planes must start at multiples of 64 bytes");
    if (plane_end(cache.shape.plane, kernels, planes) > format.page_bytes)
      refuse("a plane reaches past its page's " + text(static_cast<int64_t>(format.page_bytes)) + " bytes");
  }
}

int add_format(CacheLayout& cache, const KernelTable& kernels, PageLayout format) {
  check_layout(cache, kernels, format);
  if (cache.formats.size() > 255) refuse("no more than 256 page formats");
  cache.formats.push_back(std::move(format));
  return static_cast<int>(cache.formats.size()) - 1;
}

Step::Step(const CacheLayout& cache, const BatchView& batch, const RopeTable& rope, int threads)
    : cache_(&cache), rope_(rope), memory_(batch.memory), n_rows_(batch.n_rows) {
  const size_t page_size = cache.shape.plane.page_size, heads = cache.shape.plane.n_heads;
  const size_t group = cache.shape.group;
  const auto fits = [&](int64_t offset, size_t bytes) {
    return offset >= 0 && offset % static_cast<int64_t>(kPlaneAlign) == 0 && bytes <= batch.memory_bytes &&
           static_cast<size_t>(offset) <= batch.memory_bytes - bytes;
  };
  if (rope.dim % 2 != 0 || rope.dim > cache.shape.plane.head_dim)
    refuse("rotary dimension must be even, at most head_dim");
  if (reinterpret_cast<uintptr_t>(batch.memory) % alignof(float) != 0) refuse("memory must be aligned to 4 bytes");

  for (size_t e = 0; e < batch.n_entries; ++e) {
    const size_t format = batch.page_format[e];
    if (format >= cache.formats.size())
      refuse("page_format[" + text(static_cast<int64_t>(e)) + "] is " + text(static_cast<int64_t>(format)) + ", but " +
             text(static_cast<int64_t>(cache.formats.size())) + " formats are registered");
    if (!fits(batch.page_offset[e], cache.formats[format].page_bytes))
      refuse("page_offset[" + text(static_cast<int64_t>(e)) + "] = " + text(batch.page_offset[e]) +
             " is no multiple of 64 with a whole page inside the arena's " +
             text(static_cast<int64_t>(batch.memory_bytes)) + " bytes");
  }
  page_offset_.assign(batch.page_offset, batch.page_offset + batch.n_entries);
  page_format_.assign(batch.page_format, batch.page_format + batch.n_entries);
  formats_used_ = page_format_;
  std::sort(formats_used_.begin(), formats_used_.end());
  formats_used_.erase(std::unique(formats_used_.begin(), formats_used_.end()), formats_used_.end());

  std::vector<OwnPage> tails;
  position_.resize(n_rows_);
  if (batch.row_start[0] != 0 || batch.entry_start[0] != 0) refuse("row_start and entry_start must begin with 0");
  for (size_t s = 0; s < batch.n_segments; ++s) {
    const std::string where = "segment " + text(static_cast<int64_t>(s)) + ": ";
    const int64_t begin = batch.row_start[s], end = batch.row_start[s + 1], first = batch.position[s];
    const int64_t entries = int64_t{batch.entry_start[s + 1]} - batch.entry_start[s];
    if (begin >= end || end > static_cast<int64_t>(n_rows_))
      refuse(where + "row_start must rise to the number of rows, " + text(static_cast<int64_t>(n_rows_)));
    if (first < 0 || static_cast<size_t>(first + end - begin) > rope.n_positions)
      refuse(where + "positions " + text(first) + " to " + text(first + end - begin - 1) + " are outside 0 to " +
             text(static_cast<int64_t>(rope.n_positions) - 1));
    const size_t start = static_cast<size_t>(first), stop = start + static_cast<size_t>(end - begin);
    if (batch.entry_start[s + 1] > static_cast<int64_t>(batch.n_entries) ||
        entries != static_cast<int64_t>(stop / page_size))
      refuse(where + "has " + text(entries) + " entries, but " + text(static_cast<int64_t>(stop / page_size)) +
             " pages are full after position " + text(static_cast<int64_t>(stop) - 1));
    const bool needs_open = start % page_size != 0 || stop % page_size != 0;
    const int64_t open = batch.open_offset[s];
    if (needs_open ? !fits(open, cache.open.page_bytes) : open >= 0 && !fits(open, cache.open.page_bytes))
      refuse(where + "open_offset = " + text(open) + " is no multiple of 64 with a whole open page inside the arena");

    entry_start_.push_back(static_cast<size_t>(batch.entry_start[s]));
    segment_open_.push_back(open);
    const size_t first_page = start / page_size, last_page = (stop - 1) / page_size;
    for (size_t page = first_page, row = static_cast<size_t>(begin); page <= last_page; ++page) {
      const size_t from = std::max(start, page * page_size), to = std::min(stop, (page + 1) * page_size);
      OwnPage own{s, page, row, to - from, from % page_size, -1, 0, 0, 0, to == (page + 1) * page_size};
      if (first_page == last_page && open >= 0) {
        own.open_offset = open;
        own_.push_back(own);
      } else if (own.completes) {
        own.scratch = n_scratch_++;
        own.gather = own.slot;
        own.saved = saved_floats_;
        saved_floats_ += own.gather * 2 * heads * cache.shape.plane.head_dim;
        own_.push_back(own);
      } else {
        own.open_offset = open;
        tails.push_back(own);
      }
      for (size_t t = from; t < to; ++t) position_[row++] = t;
    }
  }
  if (static_cast<size_t>(batch.row_start[batch.n_segments]) != n_rows_ ||
      static_cast<size_t>(batch.entry_start[batch.n_segments]) != batch.n_entries)
    refuse("row_start and entry_start must end with the numbers of rows and of entries");
  n_direct_ = own_.size();
  own_.insert(own_.end(), tails.begin(), tails.end());

  for (size_t i = 0; i < own_.size(); ++i)
    if (own_[i].completes) sealing_.push_back(i);

  saved_.resize(saved_floats_ * cache.open.layers.size());

  // Tiles, longest first so that threads end together.
  const size_t score_row = cache.shape.split_pages * page_size * sizeof(float);
  const size_t tile_tokens = std::max<size_t>(1, kTileScoreBytes / score_row / group);
  for (size_t i = 0; i < own_.size(); ++i)
    for (size_t row = 0; row < own_[i].n_rows; row += tile_tokens)
      tiles_.push_back({i, own_[i].first_row + row, std::min(tile_tokens, own_[i].n_rows - row),
                        own_[i].page / cache.shape.split_pages + 1, 0});
  std::stable_sort(tiles_.begin(), tiles_.end(),
                   [](const Tile& a, const Tile& b) { return a.n_rows * a.n_splits > b.n_rows * b.n_splits; });
  size_t partials = 0;
  for (Tile& tile : tiles_) {
    tile_rows_ = std::max(tile_rows_, tile.n_rows * group);
    tile.partial = partials;
    partials += tile.n_rows * group * heads * tile.n_splits;
  }
  // With few tiles every split is a task of its own; its partial result is the same either way.
  const size_t partial_bytes = partials * (cache.shape.plane.head_dim + 2) * sizeof(float);
  const bool split = threads > 1 && tiles_.size() * heads < 4 * static_cast<size_t>(threads) &&
                     partial_bytes <= kPartialBytes;
  n_partials_ = split ? partials : 0;
  for (size_t t = 0; t < tiles_.size(); ++t)
    for (size_t s = 0; s < (split ? tiles_[t].n_splits : 1); ++s)
      for (size_t h = 0; h < heads; ++h)
        tasks_.push_back({static_cast<uint32_t>(t), static_cast<uint32_t>(h),
                          split ? static_cast<uint32_t>(s) : kAllSplits});
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
    // One cache line more, so that two threads never write to the same one.
    thread_floats_ = (std::max(split_floats_ + 2 * tile_partial_, 2 * head_page_) + 31) / 16 * 16;
    threads_ = context.scratch.take<float>(kSlotThreads, thread_floats_ * static_cast<size_t>(context.pool.threads()));
  }

  void run() {
    for (size_t i = 0; i < step_.n_direct_; ++i)
      if (step_.own_[i].gather > 0) gather(step_.own_[i]);
    try {
      work();
    } catch (...) {
      for (size_t i = 0; i < step_.n_direct_; ++i)
        if (step_.own_[i].gather > 0) put_back(step_.own_[i]);
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
                               [&](size_t i, int thread) { attend_task(step_.tasks_[i], thread_scratch(thread)); });
    if (step_.n_partials_ > 0) {
      const auto merge_one = [&](size_t i, int) { merge_tile(step_.tiles_[i / heads_], i % heads_); };
      const size_t n = step_.tiles_.size() * heads_;
      if (step_.n_partials_ < 1024)
        for (size_t i = 0; i < n; ++i) merge_one(i, 0);
      else
        context_.pool.parallel_for(n, merge_one);
    }
  }

  struct ExactPage {
    float* keys;
    float* values;
  };

  float* thread_scratch(int thread) const { return threads_ + static_cast<size_t>(thread) * thread_floats_; }

  ExactPage open_page(int64_t offset, size_t layer) const {
    const LayerPlanes& planes = cache_.open.layers[layer];
    uint8_t* page = step_.memory_ + offset;
    return {reinterpret_cast<float*>(page + planes.key_offset), reinterpret_cast<float*>(page + planes.value_offset)};
  }

  ExactPage exact_page(const Step::OwnPage& own) const {
    if (own.open_offset >= 0) return open_page(own.open_offset, p_.layer);
    float* page = exact_ + own.scratch * 2 * heads_ * head_page_;
    return {page, page + heads_ * head_page_};
  }

  /// Copies n tokens' keys (rows of n floats, the steps apart) and values (per head, the steps apart).
  void copy_tokens(size_t n, const ExactPage& from, size_t from_row, size_t from_head, const ExactPage& to,
                   size_t to_row, size_t to_head) const {
    for (size_t c = 0; c < heads_ * d_; ++c)
      std::memcpy(to.keys + c * to_row, from.keys + c * from_row, n * sizeof(float));
    for (size_t h = 0; h < heads_; ++h)
      std::memcpy(to.values + h * to_head, from.values + h * from_head, n * d_ * sizeof(float));
  }

  ExactPage saved_tokens(const Step::OwnPage& own, size_t layer) const {
    float* keys = step_.saved_.data() + layer * step_.saved_floats_ + own.saved;
    return {keys, keys + own.gather * heads_ * d_};
  }

  /// Copies the tokens before the segment from its open page to the scratch page that completes it, and saves them.
  void gather(const Step::OwnPage& own) const {
    const ExactPage from = open_page(step_.segment_open_[own.segment], p_.layer);
    const size_t tokens = shape_.plane.page_size;
    copy_tokens(own.gather, from, tokens, head_page_, exact_page(own), tokens, head_page_);
    copy_tokens(own.gather, from, tokens, head_page_, saved_tokens(own, p_.layer), own.gather, own.gather * d_);
  }

  /// The saved tokens of this layer and those before go back to the open page.
  void put_back(const Step::OwnPage& own) const {
    const size_t tokens = shape_.plane.page_size;
    for (size_t layer = 0; layer <= p_.layer; ++layer)
      copy_tokens(own.gather, saved_tokens(own, layer), own.gather, own.gather * d_,
                  open_page(step_.segment_open_[own.segment], layer), tokens, head_page_);
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
      job.softmax_scale = p_.softmax_scale;
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

  /// Encodes one head of an own page.
  void seal(const Step::OwnPage& own, size_t head, float* scratch) const {
    const ExactPage page = exact_page(own);
    const size_t entry = step_.entry_start_[own.segment] + own.page;
    const LayerPlanes& planes = cache_.formats[step_.page_format_[entry]].layers[p_.layer];
    uint8_t* to = step_.memory_ + step_.page_offset_[entry];
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
    throw CodecRangeError(codec_error(coding, head, status) + " (layer " + std::to_string(p_.layer) + ", " + where +
                          ")");
  }

  Partial partial_at(float* p, size_t rows) const { return {p, p + rows, p + 2 * rows}; }

  void attend_task(const Step::Task& task, float* scratch) const {
    const Step::Tile& tile = step_.tiles_[task.tile];
    const size_t rows = tile.n_rows * group_;
    if (task.split != Step::kAllSplits) {
      attend_split(tile, task.head, task.split, tile_partial(tile, task.head, task.split), scratch);
      return;
    }
    const Partial sum = partial_at(scratch + split_floats_, rows);
    const Partial next = partial_at(scratch + split_floats_ + tile_partial_, rows);
    attend_split(tile, task.head, 0, sum, scratch);
    for (size_t s = 1; s < tile.n_splits; ++s) {
      attend_split(tile, task.head, s, next, scratch);
      context_.kernels.attention.merge(sum, next, rows, d_);
    }
    finish(tile, task.head, sum);
  }

  Partial tile_partial(const Step::Tile& tile, size_t head, size_t split) const {
    const size_t rows = tile.n_rows * group_;
    return partial_at(partials_ + (tile.partial + (head * tile.n_splits + split) * rows) * (d_ + 2), rows);
  }

  void merge_tile(const Step::Tile& tile, size_t head) const {
    const Partial sum = tile_partial(tile, head, 0);
    for (size_t s = 1; s < tile.n_splits; ++s)
      context_.kernels.attention.merge(sum, tile_partial(tile, head, s), tile.n_rows * group_, d_);
    finish(tile, head, sum);
  }

  void finish(const Step::Tile& tile, size_t head, const Partial& sum) const {
    const size_t token_step = heads_ * group_ * d_;
    context_.kernels.attention.finish(sum, tile.n_rows * group_, d_, group_, token_step,
                                      out_ + tile.first_row * token_step + head * group_ * d_);
  }

  SealedPage sealed_page(const Step::OwnPage& own, size_t page) const {
    const size_t entry = step_.entry_start_[own.segment] + page;
    const LayerPlanes& planes = cache_.formats[step_.page_format_[entry]].layers[p_.layer];
    const uint8_t* memory = step_.memory_ + step_.page_offset_[entry];
    return {memory + planes.key_offset, memory + planes.value_offset, planes.key, planes.value};
  }

  void attend_split(const Step::Tile& tile, size_t head, size_t split, const Partial& to, float* scratch) const {
    const Step::OwnPage& own = step_.own_[tile.own];
    const size_t first = split * shape_.split_pages, last = std::min(first + shape_.split_pages, own.page);
    SealedPage pages[kMaxSplitPages];
    SplitJob job{};
    job.shape = &shape_;
    job.head = head;
    job.pages = pages;
    job.n_pages = last - first;
    for (size_t i = 0; i < job.n_pages; ++i) pages[i] = sealed_page(own, first + i);
    if (split + 1 == tile.n_splits) {
      const ExactPage exact = exact_page(own);
      job.own_keys = exact.keys + head * head_page_;
      job.own_values = exact.values + head * head_page_;
      job.own_slot = own.slot + tile.first_row - own.first_row;
    }
    job.n_rows = tile.n_rows * group_;
    const size_t q = (head * step_.n_rows() + tile.first_row) * group_ * d_;
    job.q = q_ + q;
    job.q_rotated = q_rotated_ != nullptr ? q_rotated_ + q : nullptr;
    job.scratch = scratch;
    const int bad = context_.kernels.attention.attend_split(job, to);
    if (bad >= 0) {
      const SealedPage& page = pages[bad / 2];
      throw CodecRangeError(codec_error(bad % 2 == 0 ? page.key : page.value, head, CodecStatus::bad_scale) +
                            " (layer " + std::to_string(p_.layer) + ", page " +
                            std::to_string(first + static_cast<size_t>(bad) / 2) + " of its sequence)");
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
  size_t tile_partial_, split_floats_, thread_floats_;
};

void attend(Context& context, const Step& step, const AttentionParameters& parameters, const float* qkv, float* out) {
  AttentionRun(context, step, parameters, qkv, out).run();
}

}  // namespace octavo
