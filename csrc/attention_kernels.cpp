// The attention kernels of one instruction set. attention_types.hpp says what is computed.
//
// Scores and weighted values are the same product: rows of weights (queries, or probabilities) by a stored matrix whose
// columns lie in lanes (tokens for keys, channels for values). Affine pages are multiplied by their codes: for a group
// of columns, sum of w[k] * (code * scale[k] + minimum[k]) is sum of (w[k] * scale[k]) * code, begun from the sum of
// w[k] * minimum[k], so that scales are applied once per row of weights and page instead of once per value. Up to
// kDirectRows weight rows read the packed page itself; more read it after it has been unpacked once to f32. Both give
// the same bits, since a reader gives the same values and each (row, column) is one chain.
#include "attention_types.hpp"

#include "codecs_read.hpp"
#include "dispatch_table.hpp"
#include "math.hpp"
#include "rotation.hpp"

namespace octavo::OCTAVO_ISA {
namespace {

/// Weight rows that share the registers: 3 rows of 4 vectors leave room for a value and a weight in 16 registers.
constexpr size_t kRows = 3;
constexpr size_t kDirectRows = kRows;

/// R rows of weights, and what the sums over k begin with: base[r], on top of out's values unless `fresh`.
struct Weights {
  const float* w;
  size_t step;
  const float* base;  // or null
  bool fresh;
};

/// out[r][column ..] = the beginning + sum over k in order of w[r][k] * row k of the reader: R rows and 8 N columns.
template <int R, int N, bool kAhead, class Reader>
OCTAVO_INLINE void multiply_tile(const Reader& reader, size_t begin, size_t end, size_t column, const Weights& weights,
                                 const uint8_t* ahead, size_t columns, float* out, size_t out_step) {
  const auto at = [=](int r, int j) {
    return out + static_cast<size_t>(r) * out_step + column + 8 * static_cast<size_t>(j);
  };
  f32x8 sum[R][N];
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < N; ++j) {
      sum[r][j] = weights.fresh ? set1(0.0f) : loadf(at(r, j));
      if (weights.base != nullptr) sum[r][j] = sum[r][j] + set1(weights.base[r]);
    }
  auto cursor = reader.template at<N>(begin, column);
  Ahead<Reader, N> fetch(ahead, columns, begin, column);
  for (size_t k = begin; k < end; ++k) {
    if constexpr (kAhead) fetch.next();
    f32x8 weight[R];
    for (int r = 0; r < R; ++r) weight[r] = set1(weights.w[static_cast<size_t>(r) * weights.step + k]);
    for (int j = 0; j < N; ++j) {
      const f32x8 x = cursor.get(j);
      for (int r = 0; r < R; ++r) sum[r][j] = fma(weight[r], x, sum[r][j]);
    }
    cursor.next();
  }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < N; ++j) store(at(r, j), sum[r][j]);
}

/// The same for the columns [first, last), which begin at a multiple of kAffineGroup.
template <int R, bool kAhead, class Reader>
OCTAVO_INLINE void multiply_columns(const Reader& reader, size_t begin, size_t end, size_t first, size_t last,
                                    const Weights& weights, const uint8_t* ahead, size_t columns, float* out,
                                    size_t out_step) {
  for_tiles(last - first, [&]<int N>(size_t c) {
    multiply_tile<R, N, kAhead>(reader, begin, end, first + c, weights, ahead, columns, out, out_step);
  });
}

/// R rows of w by all rows and columns of a reader. scaled: room for R rows of weights.
template <int R, bool kAhead, class Reader>
OCTAVO_INLINE void multiply_plane(const Reader& reader, const AffineTerms& terms, size_t rows, size_t columns,
                                  const float* w, size_t w_step, const uint8_t* ahead, float* out, size_t out_step,
                                  bool fresh, float* scaled) {
  if (terms.scales == nullptr) {
    multiply_columns<R, kAhead>(reader, 0, rows, 0, columns, {w, w_step, nullptr, fresh}, ahead, columns, out,
                                out_step);
    return;
  }
  for (size_t c = 0; c < columns; c += kAffineGroup) {
    const size_t at = 2 * (c / kAffineGroup) * rows;
    f32x8 sum[R];
    for (int r = 0; r < R; ++r) sum[r] = set1(0.0f);
    for (size_t k = 0; k < rows; k += 8) {
      const f32x8 scale = load_f16(terms.scales + at + 2 * k), minimum = load_f16(terms.minima + at + 2 * k);
      for (int r = 0; r < R; ++r) {
        const size_t row = static_cast<size_t>(r);
        const f32x8 weight = loadf(w + row * w_step + k);
        sum[r] = fma(weight, minimum, sum[r]);
        store(scaled + row * rows + k, weight * scale);
      }
    }
    float base[R];
    for (int r = 0; r < R; ++r) base[r] = hsum(sum[r]);
    multiply_columns<R, kAhead>(reader, 0, rows, c, min_of(columns, c + kAffineGroup), {scaled, rows, base, fresh},
                                ahead, columns, out, out_step);
  }
}

/// Calls f.template operator()<n>() for n from 1 to kRows.
template <class F>
OCTAVO_INLINE void for_rows(size_t n, F&& f) {
  switch (n) {
    case 1: return f.template operator()<1>();
    case 2: return f.template operator()<2>();
    default: return f.template operator()<3>();
  }
}

/// Floats of scratch that multiply_head wants.
OCTAVO_INLINE size_t multiply_scratch(const PlaneShape& shape) {
  return shape.page_size * shape.head_dim + kRows * max_of(shape.page_size, shape.head_dim);
}

/// n rows of w by a stored head, all of its rows and columns. False where a stored scale is bad.
__attribute__((noinline)) bool multiply_head(const PlaneShape& shape, Coding coding, size_t head, const uint8_t* plane,
                                             size_t n, const float* w, size_t w_step, const uint8_t* ahead, float* out,
                                             size_t out_step, bool fresh, float* scratch) {
  const size_t rows = n_rows(shape, coding.role), columns = n_columns(shape, coding.role);
  float *page = scratch, *scaled = page + rows * columns;
  AffineTerms terms;
  if (!read_terms(shape, coding, head, plane, &terms)) return false;
  if (n <= kDirectRows) {
    with_reader(shape, coding, head, plane, [&](const auto& reader) {
      for_rows(n, [&]<int R>() {
        multiply_plane<R, true>(reader, terms, rows, columns, w, w_step, ahead, out, out_step, fresh, scaled);
      });
    });
    return true;
  }
  F32Reader unpacked{reinterpret_cast<const uint8_t*>(page), columns};
  if (coding.codec == CodecId::f32)
    unpacked.p = plane + head_parts(shape, coding, head).codes;
  else
    with_reader(shape, coding, head, plane, [&](const auto& reader) { read_all(reader, rows, columns, ahead, page); });
  for (size_t r = 0; r < n; r += kRows)
    for_rows(min_of(n - r, kRows), [&]<int R>() {
      multiply_plane<R, false>(unpacked, terms, rows, columns, w + r * w_step, w_step, nullptr, out + r * out_step,
                               out_step, fresh, scaled);
    });
  return true;
}

/// The own page's part of the weighted values. Row r ends at slot own_slot + r / group: values behind it are not read,
/// for they are of later tokens, or no tokens at all.
__attribute__((noinline)) void multiply_own_values(const SplitJob& job, const float* w, size_t w_step, float* out,
                                                   bool fresh) {
  const size_t d = job.shape->plane.head_dim, group = job.shape->group;
  const F32Reader reader{reinterpret_cast<const uint8_t*>(job.own_values), d};
  for (size_t r = 0; r < job.n_rows; r += kRows) {
    const size_t n = min_of(job.n_rows - r, kRows), shared = job.own_slot + r / group + 1;
    for_rows(n, [&]<int R>() {
      multiply_columns<R, false>(reader, 0, shared, 0, d, {w + r * w_step, w_step, nullptr, fresh}, nullptr, d,
                                 out + r * d, d);
    });
    for (size_t i = r + 1; i < r + n; ++i) {
      const size_t end = job.own_slot + i / group + 1;
      if (end > shared)
        multiply_columns<1, false>(reader, shared, end, 0, d, {w + i * w_step, w_step, nullptr, false}, nullptr, d,
                                   out + i * d, d);
    }
  }
}

/// score[0..n) -> exp(score - maximum), their maximum and sum. Lanes past n in the last vector become 0.
OCTAVO_INLINE void softmax_row(float* score, size_t n, float* maximum, float* sum) {
  const f32x8 lowest = set1(-__builtin_inff());
  const size_t whole = n / 8 * 8;
  if (whole < n) {
    const i32x8 lane = {0, 1, 2, 3, 4, 5, 6, 7};
    const i32x8 used = lane < set1i(static_cast<int32_t>(n - whole));
    store(score + whole, select(used, loadf(score + whole), lowest));
  }
  f32x8 top = lowest;
  for (size_t i = 0; i < n; i += 8) {
    top = max(loadf(score + i), top);
    pin(top);
  }
  const float m = hmax(top);
  f32x8 total = set1(0.0f);
  for (size_t i = 0; i < n; i += 8) {
    const f32x8 e = exp(loadf(score + i) - set1(m));
    total = total + e;
    pin(total);
    store(score + i, e);
  }
  *maximum = m;
  *sum = hsum(total);
}

size_t split_scratch(const AttentionShape& shape, size_t n_rows) {
  return n_rows * (shape.split_pages * shape.plane.page_size + shape.plane.head_dim) + multiply_scratch(shape.plane);
}

struct PlaneView {
  Coding coding;
  const uint8_t* plane;
};
OCTAVO_INLINE PlaneView sealed_key(const SplitJob& job, size_t p) { return {job.pages[p].key, job.pages[p].keys}; }
OCTAVO_INLINE PlaneView sealed_value(const SplitJob& job, size_t p) {
  return {job.pages[p].value, job.pages[p].values};
}

/// Asks for a head's scales, and returns where its codes begin.
OCTAVO_INLINE const uint8_t* fetch_scales(const PlaneShape& shape, const PlaneView& view, size_t head) {
  const HeadParts parts = head_parts(shape, view.coding, head);
  const size_t bytes = 2 * n_scales(shape, view.coding);
  for (size_t i = 0; i < bytes; i += 64) {
    __builtin_prefetch(view.plane + parts.scales + i);
    __builtin_prefetch(view.plane + parts.minima + i);
  }
  return view.plane + parts.codes;
}

int attend_split(const SplitJob& job, const Partial& out) {
  const PlaneShape& shape = job.shape->plane;
  const size_t d = shape.head_dim, tokens = shape.page_size, n = job.n_rows;
  const size_t step = job.shape->split_pages * tokens;
  float* score = job.scratch;
  float* rotated = score + n * step;
  float* scratch = rotated + n * d;

  for (size_t p = 0; p < job.n_pages; ++p) {
    const SealedPage& sealed = job.pages[p];
    const float* q = sealed.key.rotated ? job.q_rotated : job.q;
    const uint8_t* ahead = p + 1 < job.n_pages ? fetch_scales(shape, sealed_key(job, p + 1), job.head)
                                               : fetch_scales(shape, sealed_value(job, 0), job.head);
    if (!multiply_head(shape, sealed.key, job.head, sealed.keys, n, q, d, ahead, score + p * tokens, step, true,
                       scratch))
      return static_cast<int>(2 * p);
  }
  size_t before = job.n_pages * tokens;
  if (job.own_keys != nullptr) {
    constexpr Coding exact{CodecId::f32, Role::key, false};
    const PlaneShape one{tokens, 1, d};
    multiply_head(one, exact, 0, reinterpret_cast<const uint8_t*>(job.own_keys), n, job.q, d,
                  reinterpret_cast<const uint8_t*>(job.own_values), score + before, step, true, scratch);
  }
  for (size_t r = 0; r < n; ++r) {
    const size_t own = job.own_keys != nullptr ? job.own_slot + r / job.shape->group + 1 : 0;
    softmax_row(score + r * step, before + own, out.maximum + r, out.sum + r);
  }

  bool plain_fresh = true, rotated_fresh = true;
  for (size_t p = 0; p < job.n_pages; ++p) {
    const SealedPage& sealed = job.pages[p];
    bool& fresh = sealed.value.rotated ? rotated_fresh : plain_fresh;
    float* to = sealed.value.rotated ? rotated : out.accumulator;
    const uint8_t* ahead = fetch_scales(shape, sealed_value(job, min_of(p + 1, job.n_pages - 1)), job.head);
    if (!multiply_head(shape, sealed.value, job.head, sealed.values, n, score + p * tokens, step, ahead, to, d, fresh,
                       scratch))
      return static_cast<int>(2 * p + 1);
    fresh = false;
  }
  if (job.own_keys != nullptr) {
    multiply_own_values(job, score + before, step, out.accumulator, plain_fresh);
    plain_fresh = false;
  }
  if (!rotated_fresh)
    for (size_t r = 0; r < n; ++r) {
      float *to = out.accumulator + r * d, *from = rotated + r * d;
      rotate_row(from, from, d);
      for (size_t i = 0; i < d; i += 8) store(to + i, plain_fresh ? loadf(from + i) : loadf(to + i) + loadf(from + i));
    }
  return -1;
}

void merge(const Partial& left, const Partial& right, size_t n_rows, size_t head_dim) {
  for (size_t r = 0; r < n_rows; ++r) {
    const f32x8 a = set1(left.maximum[r]), b = set1(right.maximum[r]);
    const f32x8 m = max(a, b), by_left = exp(a - m), by_right = exp(b - m);
    left.maximum[r] = m[0];
    left.sum[r] = fma(set1(left.sum[r]), by_left, set1(right.sum[r]) * by_right)[0];
    float* to = left.accumulator + r * head_dim;
    const float* from = right.accumulator + r * head_dim;
    for (size_t i = 0; i < head_dim; i += 8) store(to + i, fma(loadf(to + i), by_left, loadf(from + i) * by_right));
  }
}

void finish(const Partial& partial, size_t n_rows, size_t head_dim, size_t group, size_t token_step, float* out) {
  for (size_t r = 0; r < n_rows; ++r) {
    const float* from = partial.accumulator + r * head_dim;
    float* to = out + r / group * token_step + r % group * head_dim;
    const f32x8 sum = set1(partial.sum[r]);
    for (size_t i = 0; i < head_dim; i += 8) store(to + i, loadf(from + i) / sum);
  }
}

/// Norm and rotary embedding of one head: x -> out.
OCTAVO_INLINE void prepare_head(const RowJob& job, const float* x, const float* norm, float* out) {
  const size_t d = job.shape->plane.head_dim;
  if (norm != nullptr)
    rms_norm_row(x, norm, job.norm_eps, d, out);
  else
    __builtin_memcpy(out, x, d * sizeof(float));
  rope_row(out, job.cosine, job.sine, job.rope_dim / 2, out);
}

void prepare_row(const RowJob& job) {
  const size_t d = job.shape->plane.head_dim, tokens = job.shape->plane.page_size;
  const size_t heads = job.shape->plane.n_heads, group = job.shape->group;
  const f32x8 scale = set1(job.softmax_scale);
  for (size_t h = 0; h < heads; ++h)
    for (size_t g = 0; g < group; ++g) {
      const size_t from = (h * group + g) * d, to = h * job.q_step + g * d;
      float* q = job.q + to;
      prepare_head(job, job.qkv + from, job.q_norm, q);
      for (size_t i = 0; i < d; i += 8) store(q + i, loadf(q + i) * scale);
      if (job.q_rotated != nullptr) rotate_row(q, job.q_rotated + to, d);
    }
  for (size_t h = 0; h < heads; ++h) {
    const size_t from = (heads * group + h) * d;
    float key[1024];
    prepare_head(job, job.qkv + from, job.k_norm, key);
    float* to = job.keys + h * d * tokens + job.slot;
    for (size_t i = 0; i < d; ++i) to[i * tokens] = key[i];
  }
  for (size_t h = 0; h < heads; ++h) {
    const size_t from = (heads * (group + 1) + h) * d;
    __builtin_memcpy(job.values + (h * tokens + job.slot) * d, job.qkv + from, d * sizeof(float));
  }
}

}  // namespace

AttentionKernels attention_kernels() {
  return {.prepare_row = prepare_row,
          .split_scratch = split_scratch,
          .attend_split = attend_split,
          .merge = merge,
          .finish = finish};
}

}  // namespace octavo::OCTAVO_ISA
