// The attention kernels of one instruction set. attention_types.hpp says what is computed.
#include "attention_types.hpp"

#include "attention_multiply.hpp"
#include "dispatch_table.hpp"
#include "math.hpp"
#include "rotation.hpp"

namespace octavo::OCTAVO_ISA {
namespace {

/// The own page's part of the weighted values. Row r ends at slot own_slot + r / group: values behind it are not read,
/// for they are of later tokens, or no tokens at all.
__attribute__((noinline)) void multiply_own_values(const SplitJob& job, const float* w, size_t w_step, float* out,
                                                   bool fresh) {
  const size_t d = job.shape->plane.head_dim, group = job.shape->group;
  const F32Reader reader{reinterpret_cast<const uint8_t*>(job.own_values), d};
  for (size_t r = 0; r < job.n_rows; r += kValueRows) {
    const size_t n = min_of(job.n_rows - r, kValueRows), shared = job.own_slot + r / group + 1;
    multiply_values<false>(reader, 0, shared, d, n, w + r * w_step, w_step, nullptr, out + r * d, d, fresh);
    for (size_t i = r + 1; i < r + n; ++i) {
      const size_t end = job.own_slot + i / group + 1;
      if (end > shared)
        multiply_values<false>(reader, shared, end, d, 1, w + i * w_step, w_step, nullptr, out + i * d, d, false);
    }
  }
}

/// Pages of a split in the order of their tokens: the sealed ones, then the own page if it is in the split.
struct Blocks {
  size_t n, n_sealed;
  size_t tokens;                 ///< from one page's scores to the next's
  size_t count[kMaxSplitPages];  ///< tokens of a page
  bool affine[kMaxSplitPages];   ///< whether its values are multiplied by their codes
  bool ragged;                   ///< whether a sealed page has less than `tokens`
};

/// Lanes that have one of n tokens, n < 8.
OCTAVO_INLINE i32x8 first_lanes(size_t n) {
  const i32x8 lane = {0, 1, 2, 3, 4, 5, 6, 7};
  return lane < set1i(static_cast<int32_t>(n));
}

/// A row's scores -> weights, in place: 2^(score - maximum), of an affine page with the page's own maximum, so that its
/// largest weight is 1; factor[b] is what page b's weights are to be multiplied by. Gives the maximum of all and the
/// sum of all weights. Slots of sealed pages that have no token get the weight 0; lanes of the own page past the last
/// token in its vector become 2^-126.
OCTAVO_INLINE void softmax_row(const Blocks& blocks, float* score, float* factor, float* maximum, float* sum) {
  const f32x8 lowest = set1(-__builtin_inff());
  for (size_t b = blocks.ragged ? 0 : blocks.n - 1; b < blocks.n; ++b) {
    const size_t whole = blocks.count[b] / 8 * 8;
    if (whole == blocks.count[b]) continue;
    float* last = score + b * blocks.tokens + whole;
    store(last, select(first_lanes(blocks.count[b] - whole), loadf(last), lowest));
  }
  float top[kMaxSplitPages];
  f32x8 highest = lowest;
  for (size_t b = 0; b < blocks.n; ++b) {
    f32x8 high = lowest;
    for (size_t i = 0; i < blocks.count[b]; i += 8) {
      high = max(loadf(score + b * blocks.tokens + i), high);
      pin(high);
    }
    top[b] = hmax(high);
    highest = max(high, highest);
  }
  const float m = hmax(highest);
  for (size_t b = 0; b < blocks.n; b += 8) {
    const size_t n = min_of(blocks.n - b, size_t{8});
    store_partial(factor + b, exp2_down(load_partial(top + b, n) - set1(m)), n);
  }
  f32x8 total = set1(0.0f);
  for (size_t b = 0; b < blocks.n; ++b) {
    if (!blocks.affine[b]) top[b] = m, factor[b] = 1;
    const size_t count = blocks.count[b], end = b < blocks.n_sealed ? count / 8 * 8 : count;
    f32x8 lanes = set1(0.0f);
    for (size_t i = 0; i < end; i += 8) {
      float* at = score + b * blocks.tokens + i;
      const f32x8 e = exp2_down(loadf(at) - set1(top[b]));
      lanes = lanes + e;
      pin(lanes);
      store(at, e);
    }
    if (b < blocks.n_sealed && count < blocks.tokens) {
      float* at = score + b * blocks.tokens;
      if (end < count) {
        const f32x8 e = exp2_down(loadf(at + end) - set1(top[b]));
        const f32x8 counted = select(first_lanes(count - end), e, set1(0.0f));
        lanes = lanes + counted;
        store(at + end, counted);
      }
      for (size_t i = (count + 7) / 8 * 8; i < blocks.tokens; i += 8) store(at + i, set1(0.0f));
    }
    total = fma(lanes, set1(factor[b]), total);
  }
  *maximum = m;
  *sum = hsum(total);
}

/// Rows of queries over their largest magnitude, which goes to `unit`.
OCTAVO_INLINE void normalize(const float* q, size_t n, size_t d, float* out, float* unit) {
  for (size_t r = 0; r < n; ++r, q += d, out += d) {
    f32x8 high = set1(0.0f);
    for (size_t i = 0; i < d; i += 8) {
      high = max(abs(loadf(q + i)), high);
      pin(high);
    }
    // Below the smallest normal number queries count as zero: 1 / unit would be infinite.
    unit[r] = hmax(high);
    const f32x8 inverse = set1(unit[r] < 1.17549435e-38f ? 0.0f : 1.0f / unit[r]);
    for (size_t i = 0; i < d; i += 8) store(out + i, loadf(q + i) * inverse);
  }
}

size_t split_scratch(const AttentionShape& shape, size_t n_rows) {
  // Scores, factors of pages, the rotated accumulator, queries in both bases and their units.
  return n_rows * (shape.split_pages * (shape.plane.page_size + 1) + 3 * shape.plane.head_dim + 2) +
         multiply_scratch(shape.plane);
}

struct PlaneView {
  Coding coding;
  const uint8_t* plane;
  size_t head;
};

/// Planes in the order in which a split reads them: the pages' keys, then their values, then what comes after, if that
/// is known.
OCTAVO_INLINE PlaneView plane_at(const SplitJob& job, size_t i) {
  if (i < job.n_pages) return {job.pages[i].key, job.pages[i].keys, job.head};
  if (i >= 2 * job.n_pages && job.next != nullptr) return {job.next->key, job.next->keys, job.next_head};
  const SealedPage& page = job.pages[min_of(i, 2 * job.n_pages - 1) - job.n_pages];
  return {page.value, page.values, job.head};
}

/// Asks for a head's scales.
OCTAVO_INLINE void fetch_scales(const PlaneShape& shape, const PlaneView& view) {
  const HeadParts parts = head_parts(shape, view.coding, view.head);
  const size_t bytes = 2 * n_scales(shape, view.coding);
  for (size_t i = 0; i < bytes; i += 64) {
    __builtin_prefetch(view.plane + parts.scales + i);
    __builtin_prefetch(view.plane + parts.minima + i);
  }
}

/// While plane i is read: asks for the scales of the one after the next, which are needed first and lie apart, and
/// gives the next one's codes.
OCTAVO_INLINE const uint8_t* fetch_ahead(const SplitJob& job, size_t i) {
  const PlaneShape& shape = job.shape->plane;
  fetch_scales(shape, plane_at(job, i + 2));
  const PlaneView next = plane_at(job, i + 1);
  return next.plane + head_parts(shape, next.coding, next.head).codes;
}

int attend_split(const SplitJob& job, const Partial& out) {
  const PlaneShape& shape = job.shape->plane;
  const size_t d = shape.head_dim, tokens = shape.page_size, n = job.n_rows, split_pages = job.shape->split_pages;
  const size_t step = split_pages * tokens;
  float* score = job.scratch;
  float* factor = score + n * step;
  float* rotated = factor + n * split_pages;
  float* q[2] = {rotated + n * d, rotated + 2 * n * d};  // normalized, by whether rotated
  float* unit[2] = {rotated + 3 * n * d, rotated + 3 * n * d + n};
  bool normal[2] = {false, false};
  Product product{&shape, {}, job.head, nullptr, d, nullptr, n, nullptr, d, nullptr, 1, nullptr, step, true,
                  rotated + n * (3 * d + 2)};

  for (size_t p = 0; p < job.n_pages; ++p) {
    const SealedPage& sealed = job.pages[p];
    const bool basis = sealed.key.rotated;
    product.w = basis ? job.q_rotated : job.q;
    if (is_affine(sealed.key.codec)) {
      if (!normal[basis]) normalize(product.w, n, d, q[basis], unit[basis]);
      normal[basis] = true;
      product.w = q[basis];
      product.unit = unit[basis];
    }
    product.coding = sealed.key;
    product.plane = sealed.keys;
    product.ahead = fetch_ahead(job, p);
    product.out = score + p * tokens;
    if (!multiply(product)) return static_cast<int>(2 * p);
  }
  if (job.own_keys != nullptr) {
    const PlaneShape one{tokens, 1, d};
    product.shape = &one;
    product.head = 0;
    product.coding = {CodecId::f32, Role::key, false};
    product.plane = reinterpret_cast<const uint8_t*>(job.own_keys);
    product.ahead = reinterpret_cast<const uint8_t*>(job.own_values);
    product.w = job.q;
    product.out = score + job.n_pages * tokens;
    multiply(product);
    product.shape = &shape;
    product.head = job.head;
  }

  Blocks blocks;
  blocks.n = blocks.n_sealed = job.n_pages;
  blocks.tokens = tokens;
  blocks.ragged = false;
  for (size_t p = 0; p < job.n_pages; ++p) {
    blocks.affine[p] = is_affine(job.pages[p].value.codec);
    blocks.count[p] = job.pages[p].tokens;
    blocks.ragged |= job.pages[p].tokens < tokens;
  }
  if (job.own_keys != nullptr) blocks.affine[blocks.n++] = false;
  for (size_t r = 0; r < n; ++r) {
    if (job.own_keys != nullptr) blocks.count[job.n_pages] = job.own_slot + r / job.shape->group + 1;
    softmax_row(blocks, score + r * step, factor + r * split_pages, out.maximum + r, out.sum + r);
  }

  bool plain_fresh = true, rotated_fresh = true;
  product.w_step = step;
  product.out_step = d;
  product.unit_step = split_pages;
  for (size_t p = 0; p < job.n_pages; ++p) {
    const SealedPage& sealed = job.pages[p];
    bool& fresh = sealed.value.rotated ? rotated_fresh : plain_fresh;
    product.coding = sealed.value;
    product.plane = sealed.values;
    product.used = sealed.tokens;
    product.ahead = fetch_ahead(job, job.n_pages + p);
    product.w = score + p * tokens;
    product.unit = factor + p;
    product.out = sealed.value.rotated ? rotated : out.accumulator;
    product.fresh = fresh;
    if (!multiply(product)) return static_cast<int>(2 * p + 1);
    fresh = false;
  }
  if (job.own_keys != nullptr) {
    multiply_own_values(job, score + job.n_pages * tokens, step, out.accumulator, plain_fresh);
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
    const f32x8 m = max(a, b), by_left = exp2_down(a - m), by_right = exp2_down(b - m);
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
  const f32x8 scale = set1(job.score_scale);
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
    float key[kMaxHeadDim];
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
