// A step's batch: its lists and segments, checked. attention_tasks.cpp cuts them into work.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "attention.hpp"
#include "codecs_plane.hpp"

namespace octavo {
namespace {

constexpr size_t kPlaneAlign = 64;
[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

std::string text(int64_t n) { return std::to_string(n); }
std::string text(size_t n) { return std::to_string(n); }

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
    refuse("a page format has " + text(format.layers.size()) + " layers, the model " +
           text(cache.open.layers.size()));
  for (const LayerPlanes& planes : format.layers) {
    if (planes.key.role != Role::key || planes.value.role != Role::value) refuse("a plane has the wrong role");
    if (planes.key_offset % kPlaneAlign != 0 || planes.value_offset % kPlaneAlign != 0)
      refuse("planes must start at multiples of 64 bytes");
    if (plane_end(cache.shape.plane, kernels, planes) > format.page_bytes)
      refuse("a plane reaches past its page's " + text(format.page_bytes) + " bytes");
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
  n_rows_ = n_direct_ = n_scratch_ = saved_floats_ = tile_rows_ = gather_rows_ = n_partials_ = cascade_refused_ = 0;
  segments_.clear();
  lists_.clear();
  split_start_.clear();
  entries_.clear();
  own_.clear();
  tails_.clear();
  written_.clear();
  sealing_.clear();
  tiles_.clear();
  tasks_.clear();
  members_.clear();
  layer_saved_.assign(cache_->open.layers.size(), 0);
  if (rope.dim % 2 != 0 || rope.dim > cache_->shape.plane.head_dim)
    refuse("rotary dimension must be even, at most head_dim");
  if (reinterpret_cast<uintptr_t>(batch.memory) % alignof(float) != 0) refuse("memory must be aligned to 4 bytes");

  if (batch.row_start[0] != 0 || batch.first_list[0] != 0 || batch.entry_start[0] != 0)
    refuse("row_start, first_list and entry_start must begin with 0");
  // Before anything is as large as the numbers say.
  for (size_t s = 0; s < batch.n_segments; ++s) check_rows(batch, s);
  position_.resize(batch.n_rows);
  for (size_t s = 0; s < batch.n_segments; ++s) add_segment(batch, s);
  if (static_cast<size_t>(batch.row_start[batch.n_segments]) != batch.n_rows || lists_.size() != batch.n_lists ||
      entries_.size() != batch.n_entries)
    refuse("row_start, first_list and entry_start must end with the numbers of rows, lists and entries");
  check_written();
  n_direct_ = own_.size();
  own_.insert(own_.end(), tails_.begin(), tails_.end());

  for (size_t i = 0; i < own_.size(); ++i)
    if (own_[i].completes) sealing_.push_back(i);

  formats_used_.assign(batch.page_format, batch.page_format + batch.n_entries);
  std::sort(formats_used_.begin(), formats_used_.end());
  formats_used_.erase(std::unique(formats_used_.begin(), formats_used_.end()), formats_used_.end());

  saved_.resize(saved_floats_ * cache_->open.layers.size());

  n_rows_ = batch.n_rows;
  cut_tiles();
  cut_tasks(threads);
}

void Step::check_rows(const BatchView& batch, size_t s) const {
  const auto where = [&] { return "segment " + text(s) + ": "; };
  const int64_t begin = batch.row_start[s], end = batch.row_start[s + 1], first = batch.position[s];
  if (begin >= end || end > static_cast<int64_t>(batch.n_rows))
    refuse(where() + "row_start must rise to the number of rows, " + text(batch.n_rows));
  if (first < 0 || static_cast<size_t>(first + end - begin) > rope_.n_positions)
    refuse(where() + "positions " + text(first) + " to " + text(first + end - begin - 1) + " are outside 0 to " +
           text(static_cast<int64_t>(rope_.n_positions) - 1));
}

void Step::check_written() {
  std::sort(written_.begin(), written_.end(), [](const Written& a, const Written& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.segment < b.segment;
  });
  for (size_t i = 1; i < written_.size(); ++i) {
    const Written &a = written_[i - 1], &b = written_[i];
    // The lists of one segment may name one page that is completed for several heads.
    if (b.begin < a.end && (a.segment != b.segment || a.begin != b.begin || a.is_open || b.is_open))
      refuse("segments " + text(a.segment) + " and " + text(b.segment) + " would both write at byte " + text(b.begin));
  }
  for (const List& list : lists_)
    for (size_t e = list.first; e < list.first + list.before; ++e) {
      const int64_t begin = entries_[e].offset;
      const int64_t end = begin + static_cast<int64_t>(cache_->formats[entries_[e].format].page_bytes);
      const auto after = std::lower_bound(written_.begin(), written_.end(), end,
                                          [](const Written& w, int64_t at) { return w.begin < at; });
      if (after != written_.begin() && (after - 1)->end > begin)
        refuse("the page at byte " + text(begin) + " is read, and written by segment " + text((after - 1)->segment));
    }
}

void Step::add_segment(const BatchView& batch, size_t s) {
  const size_t page_size = cache_->shape.plane.page_size, heads = cache_->shape.plane.n_heads;
  const auto where = [&] { return "segment " + text(s) + ": "; };
  const int64_t begin = batch.row_start[s], end = batch.row_start[s + 1];
  const size_t start = static_cast<size_t>(batch.position[s]), stop = start + static_cast<size_t>(end - begin);
  const bool needs_open = start % page_size != 0 || stop % page_size != 0;
  const int64_t open = batch.open_offset[s];
  if ((needs_open || open != -1) && !fits(batch, open, cache_->open.page_bytes))
    refuse(where() + "open_offset = " + text(open) + " is no multiple of 64 with a whole open page inside the arena");
  if (open >= 0) written_.push_back({open, open + static_cast<int64_t>(cache_->open.page_bytes), s, true});

  const size_t first_page = start / page_size, last_page = (stop - 1) / page_size;
  const int64_t lists = int64_t{batch.first_list[s + 1]} - batch.first_list[s];
  const size_t each_head = heads * cache_->open.layers.size();
  if (batch.first_list[s + 1] > static_cast<int64_t>(batch.n_lists) ||
      (lists != 1 && lists != static_cast<int64_t>(each_head)))
    refuse(where() + "has " + text(lists) + " lists of entries; there must be 1, or " + text(each_head) +
           " (one for each layer and KV head)");
  segments_.push_back({lists_.size(), lists > 1, first_page, open});
  for (size_t l = 0; l < static_cast<size_t>(lists); ++l)
    add_list(batch, s, l, first_page, stop / page_size - first_page);

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

void Step::add_list(const BatchView& batch, size_t segment, size_t list, size_t first_page, size_t n_pages) {
  const int64_t page_size = static_cast<int64_t>(cache_->shape.plane.page_size);
  const int64_t own = static_cast<int64_t>(first_page) * page_size;
  const size_t split_pages = cache_->shape.split_pages, at = lists_.size(), first = entries_.size();
  const auto where = [&] { return "segment " + text(segment) + ", list " + text(list); };
  const int64_t end = batch.entry_start[at + 1];
  if (end < static_cast<int64_t>(first) || end > static_cast<int64_t>(batch.n_entries))
    refuse(where() + ": entry_start must not fall, nor pass the number of entries, " + text(batch.n_entries));

  List result{first, 0, split_start_.size(), 0};
  int64_t free = 0, span = -1;
  size_t in_split = 0;
  for (size_t e = first; e < static_cast<size_t>(end); ++e) {
    const int64_t position = batch.entry_position[e], tokens = batch.n_tokens[e];
    const size_t format = batch.page_format[e];
    const auto entry = [&] { return where() + ", entry " + text(e - first); };
    if (format >= cache_->formats.size())
      refuse(entry() + " has page_format " + text(format) + ", but " + text(cache_->formats.size()) +
             " formats are registered");
    if (!fits(batch, batch.page_offset[e], cache_->formats[format].page_bytes))
      refuse(entry() + " has page_offset " + text(batch.page_offset[e]) +
             ", no multiple of 64 with a whole page inside the arena's " + text(batch.memory_bytes) + " bytes");
    if (tokens < 1 || tokens > page_size)
      refuse(entry() + " has " + text(tokens) + " tokens; a page holds 1 to " + text(page_size));
    if (position < free)
      refuse(entry() + " begins at position " + text(position) + ", before position " + text(free) +
             ", where the one before it may end");
    free = position + tokens;
    if (position < own) {
      if (free > own)
        refuse(entry() + " has positions " + text(position) + " to " + text(free - 1) +
               ", past the start of the segment's first own page, " + text(own));
      ++result.before;
    } else {
      const size_t k = e - first - result.before;
      const int64_t page = own + static_cast<int64_t>(k) * page_size;
      if (k >= n_pages)
        refuse(entry() + " begins at position " + text(position) + ", but no page from there on is completed");
      if (position != page || tokens != page_size)
        refuse(entry() + " has " + text(tokens) + " tokens from position " + text(position) + " on, in place of the " +
               text(page_size) + " from position " + text(page) + " on: a page that is completed");
      const int64_t offset = batch.page_offset[e];
      written_.push_back(
          {offset, offset + static_cast<int64_t>(cache_->formats[format].page_bytes), segment, false});
    }
    const int64_t its_span = position / (page_size * static_cast<int64_t>(split_pages));
    if (its_span != span || in_split == split_pages) {
      split_start_.push_back(e);
      ++result.n_splits;
      span = its_span;
      in_split = 0;
    }
    ++in_split;
    entries_.push_back({batch.page_offset[e], static_cast<int32_t>(position), static_cast<uint16_t>(tokens),
                        static_cast<uint8_t>(format)});
  }
  const size_t listed = entries_.size() - first - result.before;
  if (listed < n_pages)
    refuse(where() + " lacks an entry for the page from position " +
           text(own + static_cast<int64_t>(listed) * page_size) + " on, which is completed");
  split_start_.push_back(entries_.size());
  lists_.push_back(result);
}

}  // namespace octavo
