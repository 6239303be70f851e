// Readers: a head's stored plane as rows of f32, a few vectors at a time. Rows are channels and columns tokens for
// keys, rows tokens and columns channels for values. int8 and int4 are affine: what their readers give are the codes,
// and a row's values in one group of columns are code * scale + minimum. Kernel sources only, as simd.hpp.
//
// A reader's at<N>(r, c) is a cursor on the 8 N values of row r from column c on: get(i) is the i-th vector, in the
// stored basis, next() goes to the row below. N is 1, 2 or 4: a caller covers a row by fours, then a two, then a one,
// which are the runs that int4 packs by.
#pragma once

#include "codecs.hpp"
#include "simd.hpp"

namespace octavo::OCTAVO_ISA {

/// Columns that share a row's scale and minimum.
inline constexpr size_t kAffineGroup = 64;

OCTAVO_INLINE bool is_affine(CodecId codec) { return codec == CodecId::int8 || codec == CodecId::int4; }

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

/// Scales of one head, [groups][rows]; as many minima.
OCTAVO_INLINE size_t n_scales(const PlaneShape& s, Coding c) {
  return is_affine(c.codec) ? n_rows(s, c.role) * ceil_div(n_columns(s, c.role), kAffineGroup) : 0;
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
  static constexpr size_t kBits = 32;
  const uint8_t* p;
  size_t columns;

  struct Cursor {
    const uint8_t* p;
    size_t step;
    OCTAVO_MEMBER f32x8 get(int i) const { return load<f32x8>(p + 32 * i); }
    OCTAVO_MEMBER void next() { p += step; }
  };
  template <int N>
  OCTAVO_MEMBER Cursor at(size_t r, size_t c) const {
    return {p + 4 * (r * columns + c), 4 * columns};
  }
};

struct F16Reader {
  static constexpr size_t kBits = 16;
  const uint8_t* p;
  size_t columns;

  struct Cursor {
    const uint8_t* p;
    size_t step;
    OCTAVO_MEMBER f32x8 get(int i) const { return load_f16(p + 16 * i); }
    OCTAVO_MEMBER void next() { p += step; }
  };
  template <int N>
  OCTAVO_MEMBER Cursor at(size_t r, size_t c) const {
    return {p + 2 * (r * columns + c), 2 * columns};
  }
};

struct BF16Reader {
  static constexpr size_t kBits = 16;
  const uint8_t* p;
  size_t columns;

  struct Cursor {
    const uint8_t* p;
    size_t step;
    OCTAVO_MEMBER f32x8 get(int i) const { return load_bf16(p + 16 * i); }
    OCTAVO_MEMBER void next() { p += step; }
  };
  template <int N>
  OCTAVO_MEMBER Cursor at(size_t r, size_t c) const {
    return {p + 2 * (r * columns + c), 2 * columns};
  }
};

/// Codes of int8.
struct Code8Reader {
  static constexpr size_t kBits = 8;
  const uint8_t* p;
  size_t columns;

  struct Cursor {
    const uint8_t* p;
    size_t step;
    OCTAVO_MEMBER f32x8 get(int i) const { return to_f32(load_u8(p + 8 * i)); }
    OCTAVO_MEMBER void next() { p += step; }
  };
  template <int N>
  OCTAVO_MEMBER Cursor at(size_t r, size_t c) const {
    return {p + r * columns + c, columns};
  }
};

/// Codes of int4.
struct Code4Reader {
  static constexpr size_t kBits = 4;
  const uint8_t* p;
  size_t columns;

  template <int N>
  struct Cursor {
    const uint8_t* p;
    size_t step;
    OCTAVO_MEMBER f32x8 get(int i) const {
      if constexpr (N == 1) {  // a run of 8: four bytes
        uint32_t w;
        __builtin_memcpy(&w, p, 4);
        const u32x8 codes = u32x8{w, w, w, w, w, w, w, w} >> u32x8{0, 8, 16, 24, 4, 12, 20, 28};
        return to_f32(bits<i32x8>(codes) & set1i(15));
      } else {
        // Both halves load the bytes: holding them for the other would spill a sum of three rows by four vectors.
        const uint8_t* at = p + 8 * (i % (N / 2));
        asm("" : "+r"(at));
        const i32x8 both = load_u8(at);
        return to_f32(i < N / 2 ? both & set1i(15) : both >> 4);
      }
    }
    OCTAVO_MEMBER void next() { p += step; }
  };
  template <int N>
  OCTAVO_MEMBER Cursor<N> at(size_t r, size_t c) const {
    return {p + (r * columns + c) / 2, columns / 2};
  }
};

/// Where one head's scales and minima lie, f16 [groups][rows] each; null where the codec has none.
struct AffineTerms {
  const uint8_t* scales;
  const uint8_t* minima;
};

/// False where a stored scale is not a positive number, or a minimum no number.
OCTAVO_INLINE bool read_terms(const PlaneShape& s, Coding c, size_t head, const uint8_t* plane, AffineTerms* terms) {
  const size_t n = n_scales(s, c);
  *terms = {nullptr, nullptr};
  if (n == 0) return true;
  const HeadParts parts = head_parts(s, c, head);
  *terms = {plane + parts.scales, plane + parts.minima};
  // The bits of positive finite f16 are 1 to 0x7bff; with one taken off, zero and negative numbers lie above them.
  u16x8 scale = {}, minimum = {};
  for (size_t i = 0; i < n; i += 8) {
    scale = max(scale, load<u16x8>(terms->scales + 2 * i) - 1);
    minimum = max(minimum, load<u16x8>(terms->minima + 2 * i) & 0x7fff);
  }
  return hmax(scale) < 0x7bff && hmax(minimum) < 0x7c00;
}

/// Calls f(reader) with the reader of one head.
template <class F>
OCTAVO_INLINE void with_reader(const PlaneShape& s, Coding c, size_t head, const uint8_t* plane, F&& f) {
  const uint8_t* codes = plane + head_parts(s, c, head).codes;
  const size_t columns = n_columns(s, c.role);
  switch (c.codec) {
    case CodecId::f32: return f(F32Reader{codes, columns});
    case CodecId::f16: return f(F16Reader{codes, columns});
    case CodecId::bf16: return f(BF16Reader{codes, columns});
    case CodecId::int8: return f(Code8Reader{codes, columns});
    case CodecId::int4: return f(Code4Reader{codes, columns});
  }
  __builtin_unreachable();
}

/// A cursor on another head's codes, to ask for their cache lines: while one page is read the next is on its way. Any
/// address is allowed.
template <class Reader, int N>
struct Ahead {
  const uint8_t* p;
  size_t step;
  OCTAVO_MEMBER Ahead(const uint8_t* codes, size_t columns, size_t r, size_t c)
      : p(codes + (r * columns + c) * Reader::kBits / 8), step(columns * Reader::kBits / 8) {}
  OCTAVO_MEMBER void next() {
    for (size_t i = 0; i < N * Reader::kBits; i += 64) __builtin_prefetch(p + i);
    p += step;
  }
};

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

/// All rows of a reader into out [rows][columns]. ahead: another head's codes.
template <class Reader>
OCTAVO_INLINE void read_all(const Reader& reader, size_t rows, size_t columns, const uint8_t* ahead, float* out) {
  for_tiles(columns, [&]<int N>(size_t c) {
    auto cursor = reader.template at<N>(0, c);
    Ahead<Reader, N> fetch(ahead, columns, 0, c);
    for (size_t r = 0; r < rows; ++r) {
      fetch.next();
      for (int i = 0; i < N; ++i) store(out + r * columns + c + 8 * static_cast<size_t>(i), cursor.get(i));
      cursor.next();
    }
  });
}

}  // namespace octavo::OCTAVO_ISA
