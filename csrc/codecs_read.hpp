// Readers: a head's stored plane as rows of f32, a few vectors at a time. Rows are channels and columns tokens for keys,
// rows tokens and columns channels for values. Kernel sources only, as simd.hpp.
//
// A reader's load<N>(row, column, x) gives x[0..N) = the values at columns column .. column + 8 N, in the stored basis.
// N is 1, 2 or 4; a caller covers a row by fours, then a two, then a one, which are the runs that int4 packs by.
#pragma once

#include "codecs.hpp"
#include "simd.hpp"

#define OCTAVO_MEMBER __attribute__((always_inline)) inline

namespace octavo::OCTAVO_ISA {

inline constexpr size_t kInt8Group = 32;
inline constexpr size_t kInt4Group = 64;

OCTAVO_INLINE size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }

/// Columns of a head's stored matrix.
OCTAVO_INLINE size_t n_columns(const PlaneShape& s, Role role) { return role == Role::key ? s.page_size : s.head_dim; }
OCTAVO_INLINE size_t n_rows(const PlaneShape& s, Role role) { return role == Role::key ? s.head_dim : s.page_size; }

/// Bytes of one head's codes.
OCTAVO_INLINE size_t code_bytes(const PlaneShape& s, CodecId codec) {
  const size_t n = s.page_size * s.head_dim;
  switch (codec) {
    case CodecId::f32: return 4 * n;
    case CodecId::f16:
    case CodecId::bf16: return 2 * n;
    case CodecId::int8: return n;
    case CodecId::int4: return n / 2;
  }
  __builtin_unreachable();
}

/// Scales of one head.
OCTAVO_INLINE size_t n_scales(const PlaneShape& s, Coding c) {
  switch (c.codec) {
    case CodecId::f32:
    case CodecId::f16:
    case CodecId::bf16: return 0;
    case CodecId::int8: return s.page_size * ceil_div(s.head_dim, kInt8Group);
    case CodecId::int4: return n_rows(s, c.role) * ceil_div(n_columns(s, c.role), kInt4Group);
  }
  __builtin_unreachable();
}

/// Byte offsets of one head's parts in its plane.
struct HeadParts {
  size_t codes, scales, minima;
};
OCTAVO_INLINE HeadParts head_parts(const PlaneShape& s, Coding c, size_t head) {
  const size_t codes = code_bytes(s, c.codec), scales = 2 * n_scales(s, c);
  const size_t first = codes * s.n_heads;
  return {codes * head, first + scales * head, first + scales * (s.n_heads + head)};
}

struct F32Reader {
  const uint8_t* p;
  size_t columns;
  template <int N>
  OCTAVO_MEMBER void load(size_t row, size_t column, f32x8 (&x)[N]) const {
    const uint8_t* q = p + 4 * (row * columns + column);
    for (int i = 0; i < N; ++i) x[i] = octavo::OCTAVO_ISA::load<f32x8>(q + 32 * i);
  }
};

struct F16Reader {
  const uint8_t* p;
  size_t columns;
  template <int N>
  OCTAVO_MEMBER void load(size_t row, size_t column, f32x8 (&x)[N]) const {
    const uint8_t* q = p + 2 * (row * columns + column);
    for (int i = 0; i < N; ++i) x[i] = load_f16(q + 16 * i);
  }
};

struct BF16Reader {
  const uint8_t* p;
  size_t columns;
  template <int N>
  OCTAVO_MEMBER void load(size_t row, size_t column, f32x8 (&x)[N]) const {
    const uint8_t* q = p + 2 * (row * columns + column);
    for (int i = 0; i < N; ++i) x[i] = load_bf16(q + 16 * i);
  }
};

/// Keys: a scale per token (column) and group of channels (rows).
struct Int8KeyReader {
  const uint8_t* p;
  size_t columns;
  const float* scale;  // [ceil(head_dim / 32)][page_size]
  template <int N>
  OCTAVO_MEMBER void load(size_t row, size_t column, f32x8 (&x)[N]) const {
    const uint8_t* q = p + row * columns + column;
    const float* s = scale + row / kInt8Group * columns + column;
    for (int i = 0; i < N; ++i) x[i] = to_f32(load_i8(q + 8 * i)) * loadf(s + 8 * i);
  }
};

/// Values: a scale per token (row) and group of channels (columns).
struct Int8ValueReader {
  const uint8_t* p;
  size_t columns;
  const float* scale;  // [page_size][groups]
  size_t groups;
  template <int N>
  OCTAVO_MEMBER void load(size_t row, size_t column, f32x8 (&x)[N]) const {
    const uint8_t* q = p + row * columns + column;
    const f32x8 s = set1(scale[row * groups + column / kInt8Group]);
    for (int i = 0; i < N; ++i) x[i] = to_f32(load_i8(q + 8 * i)) * s;
  }
};

/// Keys and values: a scale and a minimum per row and group of columns, at [row * row_step + group * group_step].
struct Int4Reader {
  const uint8_t* p;
  size_t columns;
  const float* scale;
  const float* minimum;
  size_t row_step, group_step;
  template <int N>
  OCTAVO_MEMBER void load(size_t row, size_t column, f32x8 (&x)[N]) const {
    const uint8_t* q = p + (row * columns + column) / 2;
    const size_t at = row * row_step + column / kInt4Group * group_step;
    const f32x8 s = set1(scale[at]), m = set1(minimum[at]);
    const i32x8 low = set1i(15);
    if constexpr (N == 1) {  // a run of 8: four bytes
      uint32_t w;
      __builtin_memcpy(&w, q, 4);
      const u32x8 codes = u32x8{w, w, w, w, w, w, w, w} >> u32x8{0, 8, 16, 24, 4, 12, 20, 28};
      x[0] = fma(to_f32(bits<i32x8>(codes) & low), s, m);
    } else {  // code * scale is exact in f32, so fma and a product with a sum give the same bits
      for (int i = 0; i < N / 2; ++i) {
        const i32x8 both = load_u8(q + 8 * i);
        x[i] = fma(to_f32(both & low), s, m);
        x[i + N / 2] = fma(to_f32(both >> 4), s, m);
      }
    }
  }
};

/// n scales (a multiple of 8) as f32. False where one is not a positive number.
OCTAVO_INLINE bool widen_scales(const uint8_t* p, size_t n, float* out) {
  i32x8 good = set1i(-1);
  for (size_t i = 0; i < n; i += 8) {
    const f32x8 s = load_f16(p + 2 * i);
    good &= (s > set1(0.0f)) & (s < set1(__builtin_inff()));
    store(out + i, s);
  }
  return hsum(good) == -8;
}

/// n minima (a multiple of 8) as f32. False where one is no number.
OCTAVO_INLINE bool widen_minima(const uint8_t* p, size_t n, float* out) {
  i32x8 good = set1i(-1);
  for (size_t i = 0; i < n; i += 8) {
    const f32x8 m = load_f16(p + 2 * i);
    good &= abs(m) < set1(__builtin_inff());
    store(out + i, m);
  }
  return hsum(good) == -8;
}

/// Calls f(reader) with the reader of one head. scratch: page_size * head_dim floats, which the reader refers to.
/// False, without a call, where a stored scale is bad.
template <class F>
OCTAVO_INLINE bool with_reader(const PlaneShape& s, Coding c, size_t head, const uint8_t* plane, float* scratch, F&& f) {
  const HeadParts parts = head_parts(s, c, head);
  const uint8_t* codes = plane + parts.codes;
  const size_t columns = n_columns(s, c.role), scales = n_scales(s, c);
  switch (c.codec) {
    case CodecId::f32: f(F32Reader{codes, columns}); return true;
    case CodecId::f16: f(F16Reader{codes, columns}); return true;
    case CodecId::bf16: f(BF16Reader{codes, columns}); return true;
    case CodecId::int8:
      if (!widen_scales(plane + parts.scales, scales, scratch)) return false;
      if (c.role == Role::key)
        f(Int8KeyReader{codes, columns, scratch});
      else
        f(Int8ValueReader{codes, columns, scratch, ceil_div(s.head_dim, kInt8Group)});
      return true;
    case CodecId::int4: {
      float* minimum = scratch + scales;
      if (!widen_scales(plane + parts.scales, scales, scratch)) return false;
      if (!widen_minima(plane + parts.minima, scales, minimum)) return false;
      if (c.role == Role::key)
        f(Int4Reader{codes, columns, scratch, minimum, 1, s.head_dim});
      else
        f(Int4Reader{codes, columns, scratch, minimum, ceil_div(s.head_dim, kInt4Group), 1});
      return true;
    }
  }
  __builtin_unreachable();
}

/// Calls f.template operator()<N>(column) for tiles of 8 N columns that cover `columns`.
template <class F>
OCTAVO_INLINE void for_tiles(size_t columns, F&& f) {
  size_t c = 0;
  for (; c + 32 <= columns; c += 32) f.template operator()<4>(c);
  if (c + 16 <= columns) {
    f.template operator()<2>(c);
    c += 16;
  }
  if (c < columns) f.template operator()<1>(c);
}

/// All rows of a reader into out [rows][columns].
template <class Reader>
OCTAVO_INLINE void read_all(const Reader& reader, size_t rows, size_t columns, float* out) {
  for (size_t r = 0; r < rows; ++r)
    for_tiles(columns, [&]<int N>(size_t c) {
      f32x8 x[N];
      reader.load(r, c, x);
      for (int i = 0; i < N; ++i) store(out + r * columns + c + 8 * static_cast<size_t>(i), x[i]);
    });
}

}  // namespace octavo::OCTAVO_ISA
