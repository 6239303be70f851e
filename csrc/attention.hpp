// Attention over pages: from a step's projected rows to the weighted values of every query head, writing and sealing
// pages on the way.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "context.hpp"

namespace octavo {

/// Where one layer's planes lie in a page of some format, and how they are written.
struct LayerPlanes {
  Coding key, value;
  size_t key_offset, value_offset;
};

/// A page format: one entry per layer.
struct PageLayout {
  std::vector<LayerPlanes> layers;
  size_t page_bytes;
};

/// What all layers of a cache group share. Layers are counted within the group.
struct CacheLayout {
  AttentionShape shape;
  PageLayout open;                   ///< f32
  std::vector<PageLayout> formats;   ///< by format id
};

/// Throws std::invalid_argument where kernels cannot work on the shape.
void check_cache(const CacheLayout& cache);

/// Throws std::invalid_argument where planes reach past the page's end, have another number of layers than the open
/// format, or are misaligned.
void check_layout(const CacheLayout& cache, const KernelTable& kernels, const PageLayout& format);

/// Checks the format and returns its id.
int add_format(CacheLayout& cache, const KernelTable& kernels, PageLayout format);

/// One step's rows, and the entries of one cache group, as octavo.ops.base.Batch describes them.
struct BatchView {
  uint8_t* memory;
  size_t memory_bytes;
  size_t n_rows, n_segments, n_lists, n_entries;
  const int32_t* row_start;
  const int32_t* position;        ///< of a segment's first row
  const int32_t* first_list;
  const int32_t* entry_start;
  const int64_t* page_offset;
  const uint8_t* page_format;
  const int32_t* entry_position;  ///< of an entry's first token
  const int32_t* n_tokens;
  const int64_t* open_offset;
};

/// cos and sin of every position a step may have, float [n_positions][dim / 2] each. dim is at most head_dim.
struct RopeTable {
  const float* cosine;
  const float* sine;
  size_t n_positions;
  size_t dim;
};

/// Partials beyond this are merged as they are made, at the price of fewer tasks.
inline constexpr size_t kPartialBytes = 64 << 20;

/// A batch, checked and cut into work: once per step, used by every layer of a cache group. One object serves all steps,
/// so that once its vectors have grown a step allocates nothing.
class Step {
 public:
  /// partial_bytes: the most that partial results of tiles may take that share splits or have them as tasks.
  explicit Step(const CacheLayout& cache, size_t partial_bytes = kPartialBytes)
      : cache_(&cache), partial_bytes_(partial_bytes) {}

  /// The same, without a batch.
  Step empty() const { return Step(*cache_, partial_bytes_); }

  /// Throws std::invalid_argument where the batch contradicts itself, breaks a rule for lists or reaches past memory or
  /// the table; the object then holds no batch. Keeps references to cache, memory and table.
  void assign(const BatchView& batch, const RopeTable& rope, int threads);

  /// Puts back what open pages held before the step, in every layer that has run. Nothing, once it has been done.
  void restore() const;

  /// A sealed page in a list, or one that the step seals.
  struct Entry {
    int64_t offset;
    int32_t position;        ///< of its first token
    uint16_t n_tokens;
    uint8_t format;
  };
  /// Entries that are read one after the other.
  struct List {
    size_t first;            ///< of entries_
    size_t before;           ///< entries before its segment's first own page; one for each page that completes follows
    size_t split, n_splits;  ///< of split_start_
  };
  struct Segment {
    size_t first_list;
    bool per_head;           ///< a list for each layer and KV head, not one for all
    size_t first_page;       ///< its first own page
    int64_t open_offset;
  };
  /// The tokens of one segment that lie in one page.
  struct OwnPage {
    size_t segment;
    size_t page;             ///< index in its sequence
    size_t first_row, n_rows;
    size_t slot;             ///< of the first row
    int64_t open_offset;     ///< in place in the sequence's open page; -1: in scratch page `scratch`
    size_t scratch;
    size_t gather;           ///< tokens before `slot` to copy from the segment's open page to scratch
    size_t saved;            ///< where these stay in a layer's part of `saved_`
    bool completes;
  };
  /// What the rows of an own page read of a list. Split s has the entries from split_start_[split + s] to that of s + 1,
  /// the last one to `end`; it has the own page too.
  struct Reading {
    size_t split;
    size_t n_splits;
    size_t end;
  };
  /// Consecutive rows of one own page that are attended together.
  struct Tile {
    size_t own;
    size_t first_row, n_rows;
    Reading reading;         ///< of the list of all heads, or the first head's
    bool per_head;
    bool in_splits;          ///< its splits are tasks, merged when all are done
    size_t partial;          ///< where its partials begin, in (flat row, split) units over all heads
  };
  /// One KV head of one split, for one tile or for all tiles whose sequences share the split's pages (cascade).
  struct Task {
    uint32_t first, n;       ///< of members_
    uint32_t head;
    uint32_t split;          ///< kAllSplits: one tile, from the first to the last, merged on the way
  };
  static constexpr uint32_t kAllSplits = ~0u;

  const CacheLayout& cache() const { return *cache_; }
  size_t n_rows() const { return n_rows_; }
  /// Sealed pages that one KV head reads in one layer, counted as often as they are read. Where lists differ: the first
  /// head in the first layer.
  size_t page_reads() const;
  /// Tiles that would have shared splits, were it not for the limit on partial results.
  size_t cascade_refused() const { return cascade_refused_; }

 private:
  friend class AttentionRun;

  // attention_step.cpp
  void add_list(const BatchView& batch, size_t segment, size_t list, size_t first_page, size_t n_pages);
  void check_rows(const BatchView& batch, size_t s) const;
  void add_segment(const BatchView& batch, size_t s);
  /// No byte is written by two segments, or written and read.
  void check_written();
  // attention.cpp
  float* saved_tokens(const OwnPage& own, size_t layer) const {
    return saved_.data() + layer * saved_floats_ + own.saved;
  }
  // attention_tasks.cpp
  Reading reading(const OwnPage& own, size_t list) const;
  /// Entries [first, second) that split s of a reading has.
  std::pair<size_t, size_t> split_entries(const Reading& reading, size_t s) const {
    const size_t* start = split_start_.data() + reading.split + s;
    if (s + 1 < reading.n_splits) return {start[0], start[1]};
    return {std::min(start[0], reading.end), reading.end};
  }
  size_t rows_at_once() const;
  void cut_tiles();
  void cut_tasks(int threads);
  void add_task(uint32_t split, const uint32_t* tiles, size_t n);
  size_t partial_bytes(const Tile& tile) const;
  /// Fills shared_ and first_alone_, and order_ with the tiles that may share.
  void share_splits();
  /// Leaves in order_ the tiles that gain most and fit into partial_bytes_.
  void drop_tiles();
  /// Fills shared_ and first_alone_ from order_.
  void find_shared_splits();
  /// Below, at or above zero as tile a's whole splits [from, to) sort before, with or behind b's; those that end first
  /// sort first.
  int compare_splits(uint32_t a, uint32_t b, size_t from, size_t to) const;

  const CacheLayout* cache_;
  size_t partial_bytes_;
  RopeTable rope_{};
  uint8_t* memory_ = nullptr;
  size_t n_rows_ = 0;
  std::vector<size_t> position_;         // of each row
  std::vector<Segment> segments_;
  std::vector<List> lists_;
  std::vector<size_t> split_start_;      // of each list's splits the first entry, then the list's end
  std::vector<Entry> entries_;
  std::vector<uint8_t> formats_used_;
  std::vector<OwnPage> own_;             // pages that may be written at once
  std::vector<size_t> sealing_;          // those of own_ that complete
  size_t n_direct_ = 0;                  // own_[n_direct_, ...) reuse an open page: written after the others
  size_t n_scratch_ = 0;
  // [layer][tokens gathered]: a segment that spans pages overwrites its open page's tokens with those of its last page;
  // a step that fails in a later layer puts them back.
  size_t saved_floats_ = 0;              // of one layer
  mutable std::vector<float> saved_;
  mutable std::vector<uint8_t> layer_saved_;
  /// Bytes that a segment writes: its open page, or a page that it completes.
  struct Written {
    int64_t begin, end;
    size_t segment;
    bool is_open;
  };
  std::vector<Written> written_;         // while the batch is checked
  std::vector<OwnPage> tails_;           // while segments are added
  std::vector<Tile> tiles_;
  struct Shared {
    uint32_t first, n;                   // of order_
    uint32_t split;
  };
  std::vector<uint32_t> order_;          // tiles by their pages
  std::vector<Shared> shared_;           // tiles that read the same pages in a split, by rising split
  std::vector<Shared> level_, next_;     // while these are looked for
  std::vector<uint32_t> by_gain_;        // places in order_, while tiles are dropped
  std::vector<uint32_t> first_alone_;    // of each tile: splits before it are shared
  size_t cascade_refused_ = 0;
  std::vector<Task> tasks_;
  std::vector<uint32_t> members_;        // tiles of tasks
  size_t tile_rows_ = 0;                 // flat rows of the largest task
  size_t gather_rows_ = 0;               // of the largest task with several tiles
  size_t n_partials_ = 0;                // of tiles in splits
};

/// One layer's parameters. Null where the model has none.
struct AttentionParameters {
  size_t layer;            ///< within its cache group
  size_t model_layer;      ///< its number in errors
  float norm_eps;
  float softmax_scale;
  const float* q_norm;     ///< [head_dim]
  const float* k_norm;
};

/// qkv [n_rows][(n_heads + 2 * n_kv_heads) * head_dim] -> out [n_rows][n_heads * head_dim]. Writes exact keys and
/// values, seals the pages that the rows complete, attends. Throws CodecRangeError, naming layer, role and token.
///
/// After an exception the step is lost, but its segments may be run again from the same positions: open pages hold the
/// tokens before them, in all layers of the group, as they did before the step. Those of the model's other groups do so
/// once their steps are restored.
void attend(Context& context, const Step& step, const AttentionParameters& parameters, const float* qkv, float* out);

}  // namespace octavo
