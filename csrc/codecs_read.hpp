// Readers: a head's stored plane, a few vectors at a time. Rows are channels and columns tokens for keys, rows tokens
// and columns channels for values. Kernel sources only, as simd.hpp.
//
// A reader's at<N>(r, c) is a cursor on 8 N columns from c on: get(i) is the i-th vector, in the stored basis, next()
// goes on downwards. Exact codecs give row r as f32. int8 and int4 are affine: they give the codes of rows r and r + 1,
// r even, as 16-bit integers side by side, ready for products that add up in pairs. Codes are given as stored, less
// their middle: a row's values in one group of columns are (code + middle) * scale + minimum.
#pragma once

#include "codecs.hpp"
#include "simd.hpp"

namespace octavo::OCTAVO_ISA {

/// Columns that share a row's scale and minimum.
inline constexpr size_t kAffineGroup = 64;

OCTAVO_INLINE bool is_affine(CodecId codec) { return codec == CodecId::int8 || codec == CodecId::int4; }

/// What stored codes lack.
OCTAVO_INLINE int32_t middle(CodecId codec) { return codec == CodecId::int8 ? 128 : 8; }

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
    OCTAVO_MEMBER i16x16 get(int i) const { return load_i8x16(p + 16 * i); }
    OCTAVO_MEMBER void next() { p += step; }
  };
  template <int N>
  OCTAVO_MEMBER Cursor at(size_t r, size_t c) const {
    return {p + r * columns + 2 * c, 2 * columns};
  }
};

/// Codes of int4. N is 1 or 2: a caller covers a row by twos, then a one, which are the runs that they are packed by.
struct Code4Reader {
  static constexpr size_t kBits = 4;
  const uint8_t* p;
  size_t columns;

  template <int N>
  struct Cursor {
    const uint8_t* p;
    size_t step;
    OCTAVO_MEMBER i16x16 get(int i) const {
      if constexpr (N == 1) {
        const i16x8 both = __builtin_convertvector(load<i8x8>(p), i16x8), low = both << 12 >> 12, high = both >> 4;
        return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
      } else {
        const i16x16 both = load_i8x16(p);
        return i == 0 ? both << 12 >> 12 : both >> 4;
      }
    }
    OCTAVO_MEMBER void next() { p += step; }
  };
  template <int N>
  OCTAVO_MEMBER Cursor<N> at(size_t r, size_t c) const {
    return {p + r * columns / 2 + c, columns};
  }
};

/// Codes of either, unpacked.
struct Code16Reader {
  static constexpr size_t kBits = 16;
  const int16_t* p;  ///< [rows / 2][columns][2]
  size_t columns;

  struct Cursor {
    const int16_t* p;
    size_t step;
    OCTAVO_MEMBER i16x16 get(int i) const { return load<i16x16>(p + 16 * i); }
    OCTAVO_MEMBER void next() { p += step; }
  };
  template <int N>
  OCTAVO_MEMBER Cursor at(size_t r, size_t c) const {
    return {p + r * columns + 2 * c, 2 * columns};
  }
};

/// Where one head's scales and minima lie, f16 [groups][rows] each, and the largest scale.
struct AffineTerms {
  const uint8_t* scales;
  const uint8_t* minima;
  float top;
};

/// False where one of n stored scales is not a positive number, or a minimum no number.
OCTAVO_INLINE bool read_terms(const uint8_t* scales, const uint8_t* minima, size_t n, AffineTerms* terms) {
  *terms = {scales, minima, 0};
  // The bits of positive finite f16 are 1 to 0x7bff; with one taken off, zero and negative numbers lie above them.
  u16x8 scale = {}, minimum = {};
  for (size_t i = 0; i < n; i += 8) {
    scale = max(scale, load<u16x8>(terms->scales + 2 * i) - 1);
    minimum = max(minimum, load<u16x8>(terms->minima + 2 * i) & 0x7fff);
    pin(scale);
    pin(minimum);
  }
  const uint16_t top = hmax(scale);
  const u16x8 bits = u16x8{} + static_cast<uint16_t>(top + 1);
  terms->top = load_f16(&bits)[0];
  return top < 0x7bff && hmax(minimum) < 0x7c00;
}
OCTAVO_INLINE bool read_terms(const PlaneShape& s, Coding c, size_t head, const uint8_t* plane, AffineTerms* terms) {
  const HeadParts parts = head_parts(s, c, head);
  return read_terms(plane + parts.scales, plane + parts.minima, n_scales(s, c), terms);
}

/// Calls f(reader) with the reader of one head that is stored exactly.
template <class F>
OCTAVO_INLINE void with_values(const PlaneShape& s, Coding c, size_t head, const uint8_t* plane, F&& f) {
  const uint8_t* values = plane + head_parts(s, c, head).codes;
  const size_t columns = n_columns(s, c.role);
  switch (c.codec) {
    case CodecId::f16: return f(F16Reader{values, columns});
    case CodecId::bf16: return f(BF16Reader{values, columns});
    default: return f(F32Reader{values, columns});
  }
}

/// Calls f(reader) with the reader of one head's codes.
template <class F>
OCTAVO_INLINE void with_codes(const PlaneShape& s, Coding c, size_t head, const uint8_t* plane, F&& f) {
  const uint8_t* codes = plane + head_parts(s, c, head).codes;
  const size_t columns = n_columns(s, c.role);
  if (c.codec == CodecId::int8) return f(Code8Reader{codes, columns});
  f(Code4Reader{codes, columns});
}

/// Asks for the cache lines of another head's codes: while one page is read the next is on its way. Any address is
/// allowed.
struct Ahead {
  const uint8_t* p;
  size_t step;
  /// first: bytes to pass over; step: bytes per call of next.
  OCTAVO_MEMBER Ahead(const uint8_t* codes, size_t first, size_t bytes) : p(codes + first), step(bytes) {}
  OCTAVO_MEMBER void next() {
    for (size_t i = 0; i < step; i += 64) __builtin_prefetch(p + i);
    p += step;
  }
};

/// Calls f.template operator()<N>(column) for tiles of 8 N columns that cover `columns`, N at most kWidest.
template <int kWidest, class F>
OCTAVO_INLINE void for_tiles(size_t columns, F&& f) {
  size_t c = 0;
  if constexpr (kWidest == 4)
    for (; c + 32 <= columns; c += 32) f.template operator()<4>(c);
  for (; c + 16 <= columns; c += 16) f.template operator()<2>(c);
  if (c < columns) f.template operator()<1>(c);
}

/// All rows of a reader of values into out [rows][columns]. ahead: another head's values.
template <class Reader>
OCTAVO_INLINE void read_values(const Reader& reader, size_t rows, size_t columns, const uint8_t* ahead, float* out) {
  for_tiles<4>(columns, [&]<int N>(size_t c) {
    auto cursor = reader.template at<N>(0, c);
    Ahead fetch(ahead, rows * c * Reader::kBits / 8, N * Reader::kBits);
    for (size_t r = 0; r < rows; ++r) {
      fetch.next();
      for (int i = 0; i < N; ++i) store(out + r * columns + c + 8 * static_cast<size_t>(i), cursor.get(i));
      cursor.next();
    }
  });
}

/// All rows of a reader of codes into out [rows / 2][columns][2]. ahead: another head's codes.
template <class Reader>
OCTAVO_INLINE void read_codes(const Reader& reader, size_t rows, size_t columns, const uint8_t* ahead, int16_t* out) {
  for_tiles<2>(columns, [&]<int N>(size_t c) {
    auto cursor = reader.template at<N>(0, c);
    Ahead fetch(ahead, rows * c * Reader::kBits / 8, 2 * N * Reader::kBits);
    for (size_t r = 0; r < rows; r += 2) {
      fetch.next();
      for (int i = 0; i < N; ++i) store(out + r * columns + 2 * (c + 8 * static_cast<size_t>(i)), cursor.get(i));
      cursor.next();
    }
  });
}

}  // namespace octavo::OCTAVO_ISA
