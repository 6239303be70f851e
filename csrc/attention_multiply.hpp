// Rows of weights (queries, or probabilities) by a stored head whose columns lie in lanes (tokens for keys, channels
// for values): scores and weighted values are this same product. Kernel sources only, as simd.hpp.
//
// Each (row, column) is one chain over the head's rows, so that it has the same bits however many rows of weights are
// multiplied at once. A few of them read the packed head itself, more read it after it has been unpacked once.
#pragma once

#include "codecs_read.hpp"

namespace octavo::OCTAVO_ISA {

/// A head to multiply with, and how its product is taken.
struct Product {
  const PlaneShape* shape;
  Coding coding;
  size_t head;
  const uint8_t* plane;
  size_t used;           ///< rows of the head that count; what is behind them is arbitrary, and w is 0 there
  const uint8_t* ahead;  ///< another head's codes, to ask for meanwhile
  size_t n;              ///< rows of weights
  const float* w;        ///< [n], w_step apart
  size_t w_step;
  const float* unit;     ///< row r counts unit[r * unit_step] times; read where the codec is affine
  size_t unit_step;
  float* out;            ///< [n][columns], out_step apart
  size_t out_step;
  bool fresh;            ///< overwrite out, not add to it
  float* scratch;        ///< multiply_scratch() floats
};

// ---- exact codecs ----

/// Weight rows that share the registers: 3 rows of 4 vectors leave room for a value and a weight in 16 registers.
inline constexpr size_t kValueRows = 3;

/// out[r][column ..] (+)= sum over k in order of w[r][k] * row k of the reader, for R rows and 8 N columns.
template <int R, int N, bool kAhead, class Reader>
OCTAVO_INLINE void multiply_tile(const Reader& reader, size_t begin, size_t end, size_t column, const float* w,
                                 size_t w_step, Ahead fetch, float* out, size_t out_step, bool fresh) {
  const auto at = [=](int r, int j) {
    return out + static_cast<size_t>(r) * out_step + column + 8 * static_cast<size_t>(j);
  };
  f32x8 sum[R][N];
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < N; ++j) sum[r][j] = fresh ? set1(0.0f) : loadf(at(r, j));
  auto cursor = reader.template at<N>(begin, column);
  for (size_t k = begin; k < end; ++k) {
    if constexpr (kAhead) fetch.next();
    f32x8 weight[R];
    for (int r = 0; r < R; ++r) weight[r] = set1(w[static_cast<size_t>(r) * w_step + k]);
    for (int j = 0; j < N; ++j) {
      const f32x8 x = cursor.get(j);
      for (int r = 0; r < R; ++r) sum[r][j] = fma(weight[r], x, sum[r][j]);
    }
    cursor.next();
  }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < N; ++j) store(at(r, j), sum[r][j]);
}

/// The same for all columns and any number of weight rows up to kValueRows.
template <bool kAhead, class Reader>
OCTAVO_INLINE void multiply_values(const Reader& reader, size_t begin, size_t end, size_t columns, size_t n,
                                   const float* w, size_t w_step, const uint8_t* ahead, float* out, size_t out_step,
                                   bool fresh) {
  const auto rows = [&]<int R>() {
    for_tiles<4>(columns, [&]<int N>(size_t c) {
      const Ahead fetch(ahead, (end - begin) * c * Reader::kBits / 8, N * Reader::kBits);
      multiply_tile<R, N, kAhead>(reader, begin, end, c, w, w_step, fetch, out, out_step, fresh);
    });
  };
  switch (n) {
    case 1: return rows.template operator()<1>();
    case 2: return rows.template operator()<2>();
    default: return rows.template operator()<3>();
  }
}

OCTAVO_INLINE void multiply_exact(const Product& p) {
  const size_t rows = n_rows(*p.shape, p.coding.role), columns = n_columns(*p.shape, p.coding.role);
  if (p.n <= kValueRows)
    return with_values(*p.shape, p.coding, p.head, p.plane, [&](const auto& reader) {
      multiply_values<true>(reader, 0, p.used, columns, p.n, p.w, p.w_step, p.ahead, p.out, p.out_step, p.fresh);
    });
  F32Reader unpacked{reinterpret_cast<const uint8_t*>(p.scratch), columns};
  if (p.coding.codec == CodecId::f32)
    unpacked.p = p.plane + head_parts(*p.shape, p.coding, p.head).codes;
  else
    with_values(*p.shape, p.coding, p.head, p.plane,
                [&](const auto& reader) { read_values(reader, rows, columns, p.ahead, p.scratch); });
  for (size_t r = 0; r < p.n; r += kValueRows)
    multiply_values<false>(unpacked, 0, p.used, columns, min_of(p.n - r, kValueRows), p.w + r * p.w_step, p.w_step,
                           nullptr, p.out + r * p.out_step, p.out_step, p.fresh);
}

// ---- affine codecs ----
//
// With m[k], the value of row k at code 0 as stored, sum of w[k] * value[k] is the sum of (w[k] * scale[k]) * code,
// plus the sum of w[k] * m[k]. The weights, of magnitude 1 at most, times their scales are rounded to 16-bit integers, whose
// unit is the largest scale / kLargest; products with codes then add up exactly. That rounding is at most half of
// 1 / kLargest of the largest weight that the page could have. On normal values it costs 0.8 % of what their rounding to
// 8 bits does.

/// Weight rows that share the registers: 6 rows of 2 vectors.
inline constexpr size_t kCodeRows = 6;
/// The unit of weights by `rows` rows is the largest scale / (kLargest * min(rows, kRowsInRange) / rows).
inline constexpr float kLargest = 32767;
inline constexpr size_t kRowsInRange = 512;

// Sums stay within 32 bits. A weight is at most 1 and a scale at most the largest, so that a weight times its scale is at
// most that number, `largest`, but for the rounding of largest / top and of the product with it: at most one step of a
// float, 2^-9. As an integer it is at most W = largest + 2^-9 rounded to nearest, a code at most 128 in magnitude, and
// so a sum 128 * rows * W: up to 512 rows W = 32767 and the sum 2147418112, and the most of all is 2147482624, at 1016
// rows, where largest = 16512.504 and W = 16513. 2^31 - 1 is 2147483647. (1024 rows would be too many: largest is 16383.5
// there, W = 16384, and the sum 2^31.) A row of which a weight is NaN is NaN whatever the integers are: its base is.
constexpr bool sums_stay_in_range(size_t most_rows) {
  for (size_t rows = 8; rows <= most_rows; rows += 8) {
    const size_t counted = rows < kRowsInRange ? rows : kRowsInRange;
    const double largest = static_cast<double>(kLargest) * static_cast<double>(counted) / static_cast<double>(rows);
    const auto w = static_cast<int64_t>(largest + 1.0 / 512 + 0.5);
    if (w > INT16_MAX || 128 * static_cast<int64_t>(rows) * w > INT32_MAX) return false;
  }
  return true;
}
static_assert(sums_stay_in_range(kMaxHeadDim) && sums_stay_in_range(kMaxPageSize));

/// 16-bit weights of R rows for one group of columns, and base[r] = sum of w[r][k] * m[k].
template <int R>
OCTAVO_INLINE void weigh(const uint8_t* scales, const uint8_t* minima, float middle, float per_scale, size_t rows,
                         const float* w, size_t w_step, int16_t* out, float* base) {
  f32x8 sum[R];
  for (int r = 0; r < R; ++r) sum[r] = set1(0.0f);
  for (size_t k = 0; k < rows; k += 8) {
    const f32x8 step = load_f16(scales + 2 * k), scale = step * set1(per_scale);
    const f32x8 zero = fma(step, set1(middle), load_f16(minima + 2 * k));
    for (int r = 0; r < R; ++r) {
      const f32x8 weight = loadf(w + static_cast<size_t>(r) * w_step + k);
      sum[r] = fma(weight, zero, sum[r]);
      store_i16(out + static_cast<size_t>(r) * rows + k, round_to_int(weight * scale));
    }
  }
  for (int r = 0; r < R; ++r) base[r] = hsum(sum[r]);
}

/// What sums of integers become: out (+)= sum * factor[r] + base[r].
struct Finish {
  const float* factor;
  const float* base;
  float* out;
  size_t out_step;
  bool fresh;
};

template <int R, int N, bool kAhead, class Reader>
OCTAVO_INLINE void dot_tile(const Reader& reader, size_t rows, size_t column, const int16_t* w, Ahead fetch,
                            const Finish& finish) {
  i32x8 sum[R * N];
  unroll<R * N>([&](auto i) OCTAVO_BODY { sum[i] = set1i(0); });
  auto cursor = reader.template at<N>(0, column);
  for (size_t k = 0; k < rows; k += 2) {
    if constexpr (kAhead) fetch.next();
    i16x16 x[N];
    unroll<N>([&](auto j) OCTAVO_BODY { x[j] = cursor.get(j); });
    unroll<R>([&](auto r) OCTAVO_BODY {
      const i16x16 weight = broadcast_pair(w + static_cast<size_t>(r) * rows + k);
      unroll<N>([&](auto j) OCTAVO_BODY {
        i32x8& to = sum[decltype(r)::value * N + decltype(j)::value];
        to = add_products(to, x[j], weight);
        pin(to);
      });
    });
    cursor.next();
  }
  const Finish f = finish;
  unroll<R>([&](auto r) OCTAVO_BODY {
    float* to = f.out + static_cast<size_t>(r) * f.out_step + column;
    const f32x8 base = set1(f.base[r]), factor = set1(f.factor[r]);
    unroll<N>([&](auto j) OCTAVO_BODY {
      const f32x8 from = f.fresh ? base : loadf(to + 8 * j) + base;
      store(to + 8 * j, fma(to_f32(sum[decltype(r)::value * N + decltype(j)::value]), factor, from));
    });
  });
}

/// R rows of weights, from row `first` on, by all columns of the reader.
template <int R, bool kAhead, class Reader>
OCTAVO_INLINE void dot_rows(const Product& p, const Reader& reader, const AffineTerms& terms, size_t first,
                            int16_t* weights) {
  const size_t rows = n_rows(*p.shape, p.coding.role), columns = n_columns(*p.shape, p.coding.role);
  const float largest = kLargest * static_cast<float>(min_of(rows, kRowsInRange)) / static_cast<float>(rows);
  const float zero = static_cast<float>(middle(p.coding.codec));
  float unit[R], factor[R], base[R];
  for (int r = 0; r < R; ++r) {
    unit[r] = p.unit[(first + static_cast<size_t>(r)) * p.unit_step];
    factor[r] = unit[r] * (terms.top / largest);
  }
  for (size_t c = 0; c < columns; c += kAffineGroup) {
    const size_t at = 2 * (c / kAffineGroup) * rows;
    weigh<R>(terms.scales + at, terms.minima + at, zero, largest / terms.top, rows, p.w + first * p.w_step, p.w_step,
             weights, base);
    for (int r = 0; r < R; ++r) base[r] = base[r] * unit[r];
    const Finish finish{factor, base, p.out + first * p.out_step, p.out_step, p.fresh};
    for_tiles<2>(min_of(columns - c, kAffineGroup), [&]<int N>(size_t i) {
      const Ahead fetch(p.ahead, rows * (c + i) * Reader::kBits / 8, 2 * N * Reader::kBits);
      dot_tile<R, N, kAhead>(reader, rows, c + i, weights, fetch, finish);
    });
  }
}

/// All rows of weights, in blocks of equal size.
template <bool kAhead, class Reader>
OCTAVO_INLINE void dot_head(const Product& p, const Reader& reader, const AffineTerms& terms, int16_t* weights) {
  const size_t blocks = ceil_div(p.n, kCodeRows), block = ceil_div(p.n, blocks);
  for (size_t r = 0; r < p.n; r += block) switch (min_of(p.n - r, block)) {
      case 1: dot_rows<1, kAhead>(p, reader, terms, r, weights); break;
      case 2: dot_rows<2, kAhead>(p, reader, terms, r, weights); break;
      case 3: dot_rows<3, kAhead>(p, reader, terms, r, weights); break;
      case 4: dot_rows<4, kAhead>(p, reader, terms, r, weights); break;
      case 5: dot_rows<5, kAhead>(p, reader, terms, r, weights); break;
      default: dot_rows<6, kAhead>(p, reader, terms, r, weights);
    }
}

/// read_terms of a head of which the first `used` rows alone count: from a copy to `room`, 2 n_scales numbers, in which
/// the others have the smallest scale and the minimum 0, whatever was stored.
__attribute__((noinline)) static bool read_used_terms(const Product& p, uint16_t* room, AffineTerms* terms) {
  const PlaneShape& s = *p.shape;
  const HeadParts parts = head_parts(s, p.coding, p.head);
  const size_t rows = n_rows(s, p.coding.role), n = n_scales(s, p.coding);
  uint16_t *scales = room, *minima = room + n;
  __builtin_memcpy(scales, p.plane + parts.scales, 2 * n);
  __builtin_memcpy(minima, p.plane + parts.minima, 2 * n);
  for (size_t group = 0; group < n; group += rows)
    for (size_t i = group + p.used; i < group + rows; ++i) scales[i] = 1, minima[i] = 0;
  return read_terms(reinterpret_cast<const uint8_t*>(scales), reinterpret_cast<const uint8_t*>(minima), n, terms);
}

/// False where a stored scale is bad.
OCTAVO_INLINE bool multiply_affine(const Product& p) {
  const size_t rows = n_rows(*p.shape, p.coding.role), columns = n_columns(*p.shape, p.coding.role);
  auto* codes = reinterpret_cast<int16_t*>(p.scratch);
  int16_t* weights = codes + rows * columns;
  AffineTerms terms;
  const bool good =
      p.used == rows ? read_terms(*p.shape, p.coding, p.head, p.plane, &terms)
                     : read_used_terms(p, reinterpret_cast<uint16_t*>(weights + kCodeRows * rows), &terms);
  if (!good) return false;
  with_codes(*p.shape, p.coding, p.head, p.plane, [&](const auto& reader) {
    if (p.n <= kCodeRows)
      dot_head<true>(p, reader, terms, weights);
    else
      read_codes(reader, rows, columns, p.ahead, codes);
  });
  if (p.n > kCodeRows) dot_head<false>(p, Code16Reader{codes, columns}, terms, weights);
  return true;
}

/// Floats of scratch that multiply wants: for a head of f32, or for its codes in 16 bits and then its scales and minima;
/// and for weights.
OCTAVO_INLINE size_t multiply_scratch(const PlaneShape& shape) {
  return shape.page_size * shape.head_dim + kCodeRows * max_of(shape.page_size, shape.head_dim) / 2;
}

/// False where a stored scale is bad.
__attribute__((noinline)) static bool multiply(const Product& p) {
  if (is_affine(p.coding.codec)) return multiply_affine(p);
  multiply_exact(p);
  return true;
}

}  // namespace octavo::OCTAVO_ISA
