// A step's batch, checked and cut into tasks.
#include <algorithm>
#include <map>
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

  cut_tiles();
  cut_tasks(threads);
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
  // Longest first, so that threads end together.
  std::stable_sort(tiles_.begin(), tiles_.end(),
                   [](const Tile& a, const Tile& b) { return a.n_rows * a.n_splits > b.n_rows * b.n_splits; });
}

void Step::cut_tasks(int threads) {
  const size_t heads = cache_->shape.plane.n_heads, group = cache_->shape.group;
  const size_t partial_floats = group * heads * (cache_->shape.plane.head_dim + 2);
  const auto cost = [&](const Tile& tile) { return tile.n_rows * tile.n_splits * partial_floats * sizeof(float); };
  size_t bytes = 0;
  for (const Tile& tile : tiles_) bytes += cost(tile);
  // With few tiles every split is a task of its own; its partial result is the same either way.
  const bool few = threads > 1 && tiles_.size() * heads < 4 * static_cast<size_t>(threads) && bytes <= kPartialBytes;

  std::vector<std::vector<uint32_t>> shared = shared_splits();
  bytes = 0;
  for (const auto& tiles : shared)
    for (const uint32_t t : tiles)
      if (!tiles_[t].in_splits) {
        tiles_[t].in_splits = true;
        bytes += cost(tiles_[t]);
      }
  if (bytes > kPartialBytes) {
    shared.clear();
    for (Tile& tile : tiles_) tile.in_splits = false;
  }

  std::vector<size_t> first_alone(tiles_.size(), 0);  // splits before it are shared
  for (const auto& tiles : shared) {
    const auto split = static_cast<uint32_t>(first_alone[tiles[0]]);
    add_task(split, tiles.data(), tiles.size());
    for (const uint32_t t : tiles) ++first_alone[t];
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
    for (size_t s = first_alone[t]; s < tile.n_splits; ++s) add_task(static_cast<uint32_t>(s), &t, 1);
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

std::vector<std::vector<uint32_t>> Step::shared_splits() const {
  // Sequences that share pages share them from the first on, so those of a split are refined into those of the next.
  const size_t split_pages = cache_->shape.split_pages, limit = rows_at_once();
  std::vector<std::vector<uint32_t>> result, level(1);
  for (uint32_t t = 0; t < tiles_.size(); ++t) level[0].push_back(t);
  using Pages = std::vector<std::pair<int64_t, uint8_t>>;
  for (size_t split = 0; !level.empty(); ++split) {
    std::vector<std::vector<uint32_t>> next;
    for (const auto& before : level) {
      std::map<Pages, std::vector<uint32_t>> same;
      for (const uint32_t t : before) {
        if (split + 1 >= tiles_[t].n_splits) continue;  // the last one has the tile's own page
        const size_t entry = entry_start_[own_[tiles_[t].own].segment] + split * split_pages;
        Pages pages;
        for (size_t e = entry; e < entry + split_pages; ++e) pages.emplace_back(page_offset_[e], page_format_[e]);
        same[std::move(pages)].push_back(t);
      }
      for (auto& [pages, tiles] : same) {
        // Up to `limit` tokens at a time, as in a tile.
        for (size_t i = 0; i < tiles.size();) {
          std::vector<uint32_t> part;
          for (size_t rows = 0; i < tiles.size() && (part.empty() || rows + tiles_[tiles[i]].n_rows <= limit); ++i) {
            part.push_back(tiles[i]);
            rows += tiles_[tiles[i]].n_rows;
          }
          if (part.size() > 1) {
            result.push_back(part);
            next.push_back(std::move(part));
          }
        }
      }
    }
    level = std::move(next);
  }
  return result;
}

}  // namespace octavo
