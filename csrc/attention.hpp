// Attention over pages: from a step's projected rows to the weighted values of every query head, writing and sealing
// pages on the way.
#pragma once

#include <cstddef>
#include <cstdint>
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

/// What all layers of a model share.
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

/// One step's rows as octavo.ops.base.Batch describes them.
struct BatchView {
  uint8_t* memory;
  size_t memory_bytes;
  size_t n_rows, n_segments, n_entries;
  const int32_t* row_start;
  const int32_t* position;
  const int32_t* entry_start;
  const int64_t* page_offset;
  const uint8_t* page_format;
  const int64_t* open_offset;
};

/// cos and sin of every position a step may have, float [n_positions][dim / 2] each. dim is at most head_dim.
struct RopeTable {
  const float* cosine;
  const float* sine;
  size_t n_positions;
  size_t dim;
};

/// A batch, checked and cut into work: once per step, used by every layer. One object serves all steps, so that once
/// its vectors have grown a step allocates nothing.
class Step {
 public:
  explicit Step(const CacheLayout& cache) : cache_(&cache) {}

  /// Throws std::invalid_argument where the batch contradicts itself or reaches past memory or the table; the object
  /// then holds no batch. Keeps references to cache, memory and table.
  void assign(const BatchView& batch, const RopeTable& rope, int threads);

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
  /// Consecutive rows of one own page that are attended together.
  struct Tile {
    size_t own;
    size_t first_row, n_rows;
    size_t n_splits;
    size_t partial;          ///< where its partials begin, in (flat row, split) units over all heads
    bool in_splits;          ///< its splits are tasks, merged when all are done
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
  /// Sealed pages that one KV head reads in one layer, counted as often as they are read.
  size_t page_reads() const;

 private:
  friend class AttentionRun;

  void check_pages(const BatchView& batch);
  void add_segment(const BatchView& batch, size_t s);
  size_t rows_at_once() const;
  void cut_tiles();
  void cut_tasks(int threads);
  void add_task(uint32_t split, const uint32_t* tiles, size_t n);
  /// Fills shared_ and order_.
  void find_shared_splits();
  /// Below, at or above zero as tile a's pages of whole splits [from, to) sort before, with or behind b's; those that
  /// end first sort first.
  int compare_pages(uint32_t a, uint32_t b, size_t from, size_t to) const;

  const CacheLayout* cache_;
  RopeTable rope_{};
  uint8_t* memory_ = nullptr;
  size_t n_rows_ = 0;
  std::vector<size_t> position_;         // of each row
  std::vector<size_t> entry_start_;      // of each segment
  std::vector<int64_t> segment_open_;    // of each segment
  std::vector<int64_t> page_offset_;
  std::vector<uint8_t> page_format_;
  std::vector<uint8_t> formats_used_;
  std::vector<OwnPage> own_;             // pages that may be written at once
  std::vector<size_t> sealing_;          // those of own_ that complete
  size_t n_direct_ = 0;                  // own_[n_direct_, ...) reuse an open page: written after the others
  size_t n_scratch_ = 0;
  // [layer][tokens gathered]: a segment that spans pages overwrites its open page's tokens with those of its last page;
  // a step that fails in a later layer puts them back.
  size_t saved_floats_ = 0;              // of one layer
  mutable std::vector<float> saved_;
  std::vector<OwnPage> tails_;           // while segments are added
  std::vector<Tile> tiles_;
  struct Shared {
    uint32_t first, n;                   // of order_
    uint32_t split;
  };
  std::vector<uint32_t> order_;          // tiles by their pages
  std::vector<Shared> shared_;           // tiles that read the same pages in a split, by rising split
  std::vector<Shared> level_, next_;     // while these are looked for
  std::vector<uint32_t> first_alone_;    // of each tile: splits before it are shared
  std::vector<Task> tasks_;
  std::vector<uint32_t> members_;        // tiles of tasks
  size_t tile_rows_ = 0;                 // flat rows of the largest task
  size_t gather_rows_ = 0;               // of the largest task with several tiles
  size_t n_partials_ = 0;                // of tiles in splits
};

/// One layer's parameters. Null where the model has none.
struct AttentionParameters {
  size_t layer;
  float norm_eps;
  float softmax_scale;
  const float* q_norm;     ///< [head_dim]
  const float* k_norm;
};

/// qkv [n_rows][(n_heads + 2 * n_kv_heads) * head_dim] -> out [n_rows][n_heads * head_dim]. Writes exact keys and
/// values, seals the pages that the rows complete, attends. Throws CodecRangeError, naming layer, role and token.
///
/// After an exception the step is lost, but its segments may be run again from the same positions: open pages hold the
/// tokens before them, in all layers, as they did before the step.
void attend(Context& context, const Step& step, const AttentionParameters& parameters, const float* qkv, float* out);

}  // namespace octavo
