// A step's rows cut into tiles and tasks, and the splits that several tiles share.
#include <algorithm>

#include "attention.hpp"

namespace octavo {
namespace {

/// Scores of a tile: half of a small L2 cache.
constexpr size_t kTileScoreBytes = 128 << 10;

}  // namespace

Step::Reading Step::reading(const OwnPage& own, size_t list) const {
  const List& l = lists_[list];
  const size_t split_pages = cache_->shape.split_pages;
  const size_t end = l.first + l.before + own.page - segments_[own.segment].first_page;
  const size_t* start = split_start_.data() + l.split;
  const size_t n = static_cast<size_t>(std::lower_bound(start, start + l.n_splits, end) - start);
  if (n == 0) return {l.split, 1, end};
  const size_t last_page = static_cast<size_t>(entries_[end - 1].position) / cache_->shape.plane.page_size;
  const bool joins = last_page / split_pages == own.page / split_pages && end - start[n - 1] < split_pages;
  return {l.split, joins ? n : n + 1, end};
}

size_t Step::page_reads() const {
  size_t n = 0;
  for (const Task& task : tasks_) {
    if (task.head != 0) continue;
    const Tile& tile = tiles_[members_[task.first]];
    const size_t first = task.split == kAllSplits ? 0 : task.split;
    const size_t last = task.split == kAllSplits ? tile.reading.n_splits - 1 : task.split;
    n += split_entries(tile.reading, last).second - split_entries(tile.reading, first).first;
  }
  return n;
}

size_t Step::rows_at_once() const {
  const size_t score_row = cache_->shape.split_pages * cache_->shape.plane.page_size * sizeof(float);
  return std::max<size_t>(1, kTileScoreBytes / score_row / cache_->shape.group);
}

void Step::cut_tiles() {
  const size_t tokens = rows_at_once();
  for (size_t i = 0; i < own_.size(); ++i) {
    const Segment& segment = segments_[own_[i].segment];
    const Reading read = reading(own_[i], segment.first_list);
    for (size_t row = 0; row < own_[i].n_rows; row += tokens)
      tiles_.push_back({i, own_[i].first_row + row, std::min(tokens, own_[i].n_rows - row), read, segment.per_head,
                        false, 0});
  }
  // Longest first, so that threads end together. (Not a stable sort, which allocates.)
  std::sort(tiles_.begin(), tiles_.end(), [](const Tile& a, const Tile& b) {
    const size_t x = a.n_rows * a.reading.n_splits, y = b.n_rows * b.reading.n_splits;
    return x != y ? x > y : a.first_row < b.first_row;
  });
}

size_t Step::partial_bytes(const Tile& tile) const {
  const PlaneShape& shape = cache_->shape.plane;
  return tile.n_rows * tile.reading.n_splits * cache_->shape.group * shape.n_heads * (shape.head_dim + 2) *
         sizeof(float);
}

void Step::cut_tasks(int threads) {
  const size_t heads = cache_->shape.plane.n_heads, group = cache_->shape.group;
  size_t bytes = 0;
  for (const Tile& tile : tiles_)
    if (!tile.per_head) bytes += partial_bytes(tile);
  // With few tiles every split is a task of its own; its partial result is the same either way.
  const bool few = threads > 1 && tiles_.size() * heads < 4 * static_cast<size_t>(threads) && bytes <= partial_bytes_;

  share_splits();
  for (const Shared& part : shared_) add_task(part.split, order_.data() + part.first, part.n);
  for (uint32_t t = 0; t < tiles_.size(); ++t) {
    Tile& tile = tiles_[t];
    tile.in_splits = !tile.per_head && (few || first_alone_[t] > 0);
    tile_rows_ = std::max(tile_rows_, tile.n_rows * group);
    if (!tile.in_splits) {
      add_task(kAllSplits, &t, 1);
      continue;
    }
    tile.partial = n_partials_;
    n_partials_ += tile.n_rows * group * heads * tile.reading.n_splits;
    for (size_t s = first_alone_[t]; s < tile.reading.n_splits; ++s) add_task(static_cast<uint32_t>(s), &t, 1);
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

int Step::compare_splits(uint32_t a, uint32_t b, size_t from, size_t to) const {
  const Reading &x = tiles_[a].reading, &y = tiles_[b].reading;
  // The last split has the tile's own page.
  const size_t end_x = std::min(to, x.n_splits - 1), end_y = std::min(to, y.n_splits - 1);
  for (size_t s = from; s < std::min(end_x, end_y) && x.split != y.split; ++s) {
    auto [i, i_end] = split_entries(x, s);
    auto [j, j_end] = split_entries(y, s);
    for (; i < i_end && j < j_end; ++i, ++j) {
      const Entry &p = entries_[i], &q = entries_[j];
      if (p.offset != q.offset) return p.offset < q.offset ? -1 : 1;
      if (p.format != q.format) return p.format < q.format ? -1 : 1;
      if (p.position != q.position) return p.position < q.position ? -1 : 1;
      if (p.n_tokens != q.n_tokens) return p.n_tokens < q.n_tokens ? -1 : 1;
    }
    if (i < i_end || j < j_end) return i < i_end ? 1 : -1;
  }
  return end_x == end_y ? 0 : end_x < end_y ? -1 : 1;
}

void Step::share_splits() {
  order_.clear();
  shared_.clear();
  first_alone_.assign(tiles_.size(), 0);
  size_t most = 0;
  for (uint32_t t = 0; t < tiles_.size(); ++t) {
    if (tiles_[t].per_head) continue;
    order_.push_back(t);
    most = std::max(most, tiles_[t].reading.n_splits);
  }
  if (order_.size() < 2) return;
  std::sort(order_.begin(), order_.end(), [&](uint32_t a, uint32_t b) {
    const int c = compare_splits(a, b, 0, most);
    return c != 0 ? c < 0 : a < b;
  });
  find_shared_splits();

  const auto sharing = [&] {
    size_t n = 0, bytes = 0;
    for (const uint32_t t : order_)
      if (first_alone_[t] > 0) ++n, bytes += partial_bytes(tiles_[t]);
    return std::pair{n, bytes};
  };
  const auto [wanted, bytes] = sharing();
  if (bytes <= partial_bytes_) return;
  drop_tiles();
  find_shared_splits();
  cascade_refused_ = wanted - sharing().first;
}

void Step::drop_tiles() {
  by_gain_.clear();
  for (uint32_t i = 0; i < order_.size(); ++i)
    if (first_alone_[order_[i]] > 0) by_gain_.push_back(i);
  // What a tile gains are the splits that it need not read alone. Equal ones in the order of their pages: a tile is of no
  // use without another that shares them.
  std::sort(by_gain_.begin(), by_gain_.end(), [&](uint32_t a, uint32_t b) {
    const uint32_t x = first_alone_[order_[a]], y = first_alone_[order_[b]];
    return x != y ? x > y : a < b;
  });
  size_t bytes = 0, n = 0;
  for (const uint32_t i : by_gain_) {
    const size_t more = partial_bytes(tiles_[order_[i]]);
    if (bytes + more > partial_bytes_) continue;
    bytes += more;
    by_gain_[n++] = i;
  }
  by_gain_.resize(n);
  std::sort(by_gain_.begin(), by_gain_.end());
  for (size_t i = 0; i < n; ++i) order_[i] = order_[by_gain_[i]];
  order_.resize(n);
}

void Step::find_shared_splits() {
  shared_.clear();
  first_alone_.assign(tiles_.size(), 0);
  // Sequences that share pages share them from the first on: those of a split are refined into those of the next.
  const size_t limit = rows_at_once();
  level_.clear();
  if (order_.size() > 1) level_.push_back({0, static_cast<uint32_t>(order_.size()), 0});
  for (uint32_t split = 0; !level_.empty(); ++split) {
    next_.clear();
    for (const Shared& before : level_) {
      uint32_t i = before.first;
      const uint32_t end = before.first + before.n;
      while (i < end && split + 1 >= tiles_[order_[i]].reading.n_splits) ++i;  // those that end here sort first
      while (i < end) {
        // Up to `limit` tokens at a time, as in a tile.
        const uint32_t first = i;
        size_t rows = 0;
        do rows += tiles_[order_[i++]].n_rows;
        while (i < end && rows + tiles_[order_[i]].n_rows <= limit &&
               compare_splits(order_[first], order_[i], split, split + 1) == 0);
        if (i - first > 1) next_.push_back({first, i - first, split});
      }
    }
    for (const Shared& part : next_)
      for (uint32_t i = part.first; i < part.first + part.n; ++i) ++first_alone_[order_[i]];
    shared_.insert(shared_.end(), next_.begin(), next_.end());
    std::swap(level_, next_);
  }
}

}  // namespace octavo
