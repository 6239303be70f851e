// What the attention kernels are given. Read by kernel sources too: plain data only, no code.
//
// Arithmetic. A query head of one token reads a list of entries: sealed pages, each with the position of its first token
// and the number of its tokens, of which slots behind the last hold nothing. It reads those that begin before the token's
// own page, then its own page exactly. Splits of a list: a split is a maximal run of consecutive entries whose position /
// (split_pages * page_size), rounded down, is the same, of at most split_pages entries. The own page joins the last run if
// it lies in the same span and the run has fewer than split_pages entries, else it is a split of its own. So splits
// follow from the entries' positions and from nothing else, and of a sequence with all its pages each has split_pages.
//
// Within a split: all scores (in units of ln 2: a chain of multiply-adds over channels in order, from zero), their
// maximum, the weights 2^(score - maximum), the sum of these (per page lane j adds the tokens j, j + 8, ... in order; then
// page by page; then the lanes in hsum's order), and the sum of values by weight (a chain over tokens in order, from
// zero). Splits are merged from left to right. So the result depends on the query and on the entries it reads, and on
// nothing else: slots without a token have the weight 0, and neither their values nor those values' scales are used.
//
// Pages of affine codecs are multiplied by their codes, in integers (attention_multiply.hpp): the query as rounded to
// 16 bits with each page's scales; the weights likewise, relative to the largest of the page, so that a page far below the
// split's maximum loses nothing; the page's sums are then added to the split's.
//
// Values stored in the rotated basis add up in a chain of their own, which is rotated back once per split and added.
#pragma once

#include "codecs.hpp"

namespace octavo {

inline constexpr size_t kMaxSplitPages = 64;

struct AttentionShape {
  PlaneShape plane;    ///< n_heads counts KV heads
  size_t group;        ///< query heads per KV head
  size_t split_pages;
};

/// One sealed page in one layer: its planes and how they are written.
struct SealedPage {
  const uint8_t* keys;
  const uint8_t* values;
  Coding key;
  Coding value;
  size_t tokens;  ///< slots 0 .. tokens - 1 hold one; of the others nothing counts
};

/// What one row gives before attention: its query heads, and its key and value written to an exact page.
struct RowJob {
  const AttentionShape* shape;
  size_t rope_dim;
  float norm_eps;
  float score_scale;      ///< multiplied into the query: the softmax's scale / ln 2, since weights are powers of two
  const float* qkv;       ///< [(group + 2) * n_heads * head_dim], q then k then v
  const float* q_norm;    ///< [head_dim] or null
  const float* k_norm;
  const float* cosine;    ///< [rope_dim / 2], of the row's position
  const float* sine;
  float* q;               ///< KV head h's queries [group][head_dim] go to q + h * q_step
  float* q_rotated;       ///< the same, after the Hadamard transform; or null
  size_t q_step;
  float* keys;            ///< exact page, keys [n_heads][head_dim][page_size]
  float* values;          ///< values [n_heads][page_size][head_dim]
  size_t slot;            ///< of the row's token in its page
};

/// One split of one KV head, for consecutive tokens of one page. Flat row r is query head r % group of token r / group.
struct SplitJob {
  const AttentionShape* shape;
  size_t head;
  const SealedPage* pages;  ///< the split's sealed pages, in order
  size_t n_pages;
  const SealedPage* next;   ///< a page whose keys are likely to be read after this split, to ask for; or null
  size_t next_head;
  const float* own_keys;    ///< the tokens' own page, this head [head_dim][page_size]; null in splits before its own
  const float* own_values;  ///< [page_size][head_dim]
  size_t own_slot;          ///< slot of the first token; flat row r reads slots 0 .. own_slot + r / group
  size_t n_rows;
  const float* q;           ///< [n_rows][head_dim]
  const float* q_rotated;   ///< the same in the rotated basis; read where a page's keys are rotated
  float* scratch;           ///< split_scratch() floats
};

/// A partial result of flat rows: maximum [n_rows], sum [n_rows], accumulator [n_rows][head_dim].
struct Partial {
  float* maximum;
  float* sum;
  float* accumulator;
};

struct AttentionKernels {
  void (*prepare_row)(const RowJob& job);

  size_t (*split_scratch)(const AttentionShape& shape, size_t n_rows);

  /// Returns -1, or 2 * page (+ 1 for values) of the first page with a bad scale.
  int (*attend_split)(const SplitJob& job, const Partial& out);

  /// left = left and right merged.
  void (*merge)(const Partial& left, const Partial& right, size_t n_rows, size_t head_dim);

  /// out[r] = accumulator / sum; flat row r goes to out + r / group * token_step + r % group * head_dim.
  void (*finish)(const Partial& partial, size_t n_rows, size_t head_dim, size_t group, size_t token_step, float* out);
};

}  // namespace octavo
