// A step's batch, checked and cut into tasks.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "attention.hpp"
#include "codecs_plane.hpp"

namespace octavo {
namespace {

constexpr size_t kPlaneAlign = 64;
/// Scores of a tile: half of a small L2 cache.
constexpr size_t kTileScoreBytes = 128 << 10;
/// Partials beyond this are merged as they are made, at the price of fewer tasks.
constexpr size_t kPartialBytes = 64 << 20;

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

std::string text(int64_t n) { return std::to_string(n); }

size_t plane_end(const PlaneShape& shape, const KernelTable& kernels, const LayerPlanes& planes) {
  return std::max(planes.key_offset + kernels.codecs.plane_bytes(shape, planes.key),
                  planes.value_offset + kernels.codecs.plane_bytes(shape, planes.value));
}

/// Whether a page of `bytes` lies inside the arena, at a plane's boundary.
bool fits(const BatchView& batch, int64_t offset, size_t bytes) {
  return offset >= 0 && offset % static_cast<int64_t>(kPlaneAlign) == 0 && bytes <= batch.memory_bytes &&
         static_cast<size_t>(offset) <= batch.memory_bytes - bytes;
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

void Step::assign(const BatchView& batch, const RopeTable& rope, int threads) {
  rope_ = rope;
  memory_ = batch.memory;
  n_rows_ = n_direct_ = n_scratch_ = saved_floats_ = tile_rows_ = gather_rows_ = n_partials_ = 0;
  entry_start_.clear();
  segment_open_.clear();
  own_.clear();
  tails_.clear();
  sealing_.clear();
  tiles_.clear();
  tasks_.clear();
  members_.clear();
  if (rope.dim % 2 != 0 || rope.dim > cache_->shape.plane.head_dim)
    refuse("rotary dimension must be even, at most head_dim");
  if (reinterpret_cast<uintptr_t>(batch.memory) % alignof(float) != 0) refuse("memory must be aligned to 4 bytes");
  check_pages(batch);
  page_offset_.assign(batch.page_offset, batch.page_offset + batch.n_entries);
  page_format_.assign(batch.page_format, batch.page_format + batch.n_entries);
  formats_used_ = page_format_;
  std::sort(formats_used_.begin(), formats_used_.end());
  formats_used_.erase(std::unique(formats_used_.begin(), formats_used_.end()), formats_used_.end());

  position_.resize(batch.n_rows);
  if (batch.row_start[0] != 0 || batch.entry_start[0] != 0) refuse("row_start and entry_start must begin with 0");
  for (size_t s = 0; s < batch.n_segments; ++s) add_segment(batch, s);
  if (static_cast<size_t>(batch.row_start[batch.n_segments]) != batch.n_rows ||
      static_cast<size_t>(batch.entry_start[batch.n_segments]) != batch.n_entries)
    refuse("row_start and entry_start must end with the numbers of rows and of entries");
  n_direct_ = own_.size();
  own_.insert(own_.end(), tails_.begin(), tails_.end());

  for (size_t i = 0; i < own_.size(); ++i)
    if (own_[i].completes) sealing_.push_back(i);

  saved_.resize(saved_floats_ * cache_->open.layers.size());

  n_rows_ = batch.n_rows;
  cut_tiles();
  cut_tasks(threads);
}

void Step::check_pages(const BatchView& batch) {
  for (size_t e = 0; e < batch.n_entries; ++e) {
    const size_t format = batch.page_format[e];
    if (format >= cache_->formats.size())
      refuse("page_format[" + text(static_cast<int64_t>(e)) + "] is " + text(static_cast<int64_t>(format)) + ", but " +
             text(static_cast<int64_t>(cache_->formats.size())) + " formats are registered");
    if (!fits(batch, batch.page_offset[e], cache_->formats[format].page_bytes))
      refuse("page_offset[" + text(static_cast<int64_t>(e)) + "] = " + text(batch.page_offset[e]) +
             " is no multiple of 64 with a whole page inside the arena's " +
             text(static_cast<int64_t>(batch.memory_bytes)) + " bytes");
  }
}

void Step::add_segment(const BatchView& batch, size_t s) {
  const size_t page_size = cache_->shape.plane.page_size, heads = cache_->shape.plane.n_heads;
  const auto where = [&] { return "segment " + text(static_cast<int64_t>(s)) + ": "; };
  const int64_t begin = batch.row_start[s], end = batch.row_start[s + 1], first = batch.position[s];
  const int64_t entries = int64_t{batch.entry_start[s + 1]} - batch.entry_start[s];
  if (begin >= end || end > static_cast<int64_t>(batch.n_rows))
    refuse(where() + "row_start must rise to the number of rows, " + text(static_cast<int64_t>(batch.n_rows)));
  if (first < 0 || static_cast<size_t>(first + end - begin) > rope_.n_positions)
    refuse(where() + "positions " + text(first) + " to " + text(first + end - begin - 1) + " are outside 0 to " +
           text(static_cast<int64_t>(rope_.n_positions) - 1));
  const size_t start = static_cast<size_t>(first), stop = start + static_cast<size_t>(end - begin);
  if (batch.entry_start[s + 1] > static_cast<int64_t>(batch.n_entries) ||
      entries != static_cast<int64_t>(stop / page_size))
    refuse(where() + "has " + text(entries) + " entries, but " + text(static_cast<int64_t>(stop / page_size)) +
           " pages are full after position " + text(static_cast<int64_t>(stop) - 1));
  const bool needs_open = start % page_size != 0 || stop % page_size != 0;
  const int64_t open = batch.open_offset[s];
  if ((needs_open || open >= 0) && !fits(batch, open, cache_->open.page_bytes))
    refuse(where() + "open_offset = " + text(open) + " is no multiple of 64 with a whole open page inside the arena");

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
      saved_floats_ += own.gather * 2 * heads * cache_->shape.plane.head_dim;
      own_.push_back(own);
    } else {
      own.open_offset = open;
      tails_.push_back(own);
    }
    for (size_t t = from; t < to; ++t) position_[row++] = t;
  }
}

size_t Step::page_reads() const {
  size_t n = 0;
  for (const Task& task : tasks_) {
    if (task.head != 0) continue;
    const Tile& tile = tiles_[members_[task.first]];
    const size_t before = own_[tile.own].page, first = task.split * cache_->shape.split_pages;
    n += task.split == kAllSplits ? before : std::min(first + cache_->shape.split_pages, before) - first;
  }
  return n;
}

size_t Step::rows_at_once() const {
  const size_t score_row = cache_->shape.split_pages * cache_->shape.plane.page_size * sizeof(float);
  return std::max<size_t>(1, kTileScoreBytes / score_row / cache_->shape.group);
}

void Step::cut_tiles() {
  const size_t tokens = rows_at_once();
  for (size_t i = 0; i < own_.size(); ++i)
    for (size_t row = 0; row < own_[i].n_rows; row += tokens)
      tiles_.push_back({i, own_[i].first_row + row, std::min(tokens, own_[i].n_rows - row),
                        own_[i].page / cache_->shape.split_pages + 1, 0, false});
  // Longest first, so that threads end together. (Not a stable sort, which allocates.)
  std::sort(tiles_.begin(), tiles_.end(), [](const Tile& a, const Tile& b) {
    const size_t x = a.n_rows * a.n_splits, y = b.n_rows * b.n_splits;
    return x != y ? x > y : a.first_row < b.first_row;
  });
}

void Step::cut_tasks(int threads) {
  const size_t heads = cache_->shape.plane.n_heads, group = cache_->shape.group;
  const size_t partial_floats = group * heads * (cache_->shape.plane.head_dim + 2);
  const auto cost = [&](const Tile& tile) { return tile.n_rows * tile.n_splits * partial_floats * sizeof(float); };
  size_t bytes = 0;
  for (const Tile& tile : tiles_) bytes += cost(tile);
  // With few tiles every split is a task of its own; its partial result is the same either way.
  const bool few = threads > 1 && tiles_.size() * heads < 4 * static_cast<size_t>(threads) && bytes <= kPartialBytes;

  find_shared_splits();
  bytes = 0;
  for (const Shared& part : shared_)
    for (size_t i = part.first; i < part.first + part.n; ++i) {
      Tile& tile = tiles_[order_[i]];
      if (!tile.in_splits) bytes += cost(tile);
      tile.in_splits = true;
    }
  if (bytes > kPartialBytes) {
    shared_.clear();
    for (Tile& tile : tiles_) tile.in_splits = false;
  }

  first_alone_.assign(tiles_.size(), 0);
  for (const Shared& part : shared_) {
    add_task(part.split, order_.data() + part.first, part.n);
    for (size_t i = part.first; i < part.first + part.n; ++i) ++first_alone_[order_[i]];
  }
  for (uint32_t t = 0; t < tiles_.size(); ++t) {
    Tile& tile = tiles_[t];
    tile.in_splits |= few;
    tile_rows_ = std::max(tile_rows_, tile.n_rows * group);
    if (!tile.in_splits) {
      add_task(kAllSplits, &t, 1);
      continue;
    }
    tile.partial = n_partials_;
    n_partials_ += tile.n_rows * group * heads * tile.n_splits;
    for (size_t s = first_alone_[t]; s < tile.n_splits; ++s) add_task(static_cast<uint32_t>(s), &t, 1);
  }
}

void Step::add_task(uint32_t split, const uint32_t* tiles, size_t n) {
  const auto first = static_cast<uint32_t>(members_.size());
  members_.insert(members_.end(), tiles, tiles + n);
  size_t rows = 0;
  for (size_t i = 0; i < n; ++i) rows += tiles_[tiles[i]].n_rows * cache_->shape.group;
  tile_rows_ = std::max(tile_rows_, rows);
  if (n > 1) gather_rows_ = std::max(gather_rows_, rows);
  for (size_t h = 0; h < cache_->shape.plane.n_heads; ++h)
    tasks_.push_back({first, static_cast<uint32_t>(n), static_cast<uint32_t>(h), split});
}

int Step::compare_pages(uint32_t a, uint32_t b, size_t from, size_t to) const {
  const size_t split_pages = cache_->shape.split_pages;
  // The last split has the tile's own page.
  const auto end = [&](uint32_t t) { return std::min(to, tiles_[t].n_splits - 1); };
  const auto entry = [&](uint32_t t) { return entry_start_[own_[tiles_[t].own].segment]; };
  const size_t common = std::min(end(a), end(b)) * split_pages;
  for (size_t i = from * split_pages; i < common && entry(a) != entry(b); ++i) {
    const size_t x = entry(a) + i, y = entry(b) + i;
    if (page_offset_[x] != page_offset_[y]) return page_offset_[x] < page_offset_[y] ? -1 : 1;
    if (page_format_[x] != page_format_[y]) return page_format_[x] < page_format_[y] ? -1 : 1;
  }
  return end(a) == end(b) ? 0 : end(a) < end(b) ? -1 : 1;
}

void Step::find_shared_splits() {
  shared_.clear();
  if (tiles_.size() < 2) return;
  order_.resize(tiles_.size());
  size_t most = 0;
  for (uint32_t t = 0; t < tiles_.size(); ++t) order_[t] = t, most = std::max(most, tiles_[t].n_splits);
  std::sort(order_.begin(), order_.end(), [&](uint32_t a, uint32_t b) {
    const int c = compare_pages(a, b, 0, most);
    return c != 0 ? c < 0 : a < b;
  });
  // Sequences that share pages share them from the first on: those of a split are refined into those of the next.
  const size_t limit = rows_at_once();
  level_.assign(1, {0, static_cast<uint32_t>(order_.size()), 0});
  for (uint32_t split = 0; !level_.empty(); ++split) {
    next_.clear();
    for (const Shared& before : level_) {
      uint32_t i = before.first;
      const uint32_t end = before.first + before.n;
      while (i < end && split + 1 >= tiles_[order_[i]].n_splits) ++i;  // those that end here sort first
      while (i < end) {
        // Up to `limit` tokens at a time, as in a tile.
        const uint32_t first = i;
        size_t rows = 0;
        do rows += tiles_[order_[i++]].n_rows;
        while (i < end && rows + tiles_[order_[i]].n_rows <= limit &&
               compare_pages(order_[first], order_[i], split, split + 1) == 0);
        if (i - first > 1) next_.push_back({first, i - first, split});
      }
    }
    shared_.insert(shared_.end(), next_.begin(), next_.end());
    std::swap(level_, next_);
  }
}

}  // namespace octavo
