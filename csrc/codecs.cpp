// Encoding and decoding of one head of a plane, for one instruction set.
#include "codecs.hpp"

#include "codecs_read.hpp"
#include "dispatch_table.hpp"
#include "rotation.hpp"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int32_t kExponent = 0x7f800000;

/// The eight low halves.
OCTAVO_INLINE void store_u16(void* p, i32x8 v) { store(p, __builtin_convertvector(v, u16x8)); }

OCTAVO_INLINE bool all_finite(const float* x, size_t n) {
  i32x8 top = set1i(0);
  for (size_t i = 0; i < n; i += 8) {
    top = max(top, bits<i32x8>(abs(loadf(x + i))));
    pin(top);
  }
  return hmax(top) < kExponent;
}

/// The smallest f16 >= v, for v >= 0, as bits.
OCTAVO_INLINE i32x8 f16_up(f32x8 v) {
  uint16_t h[8];
  store_f16(h, v);
  return load_u16(h) - (load_f16(h) < v);
}

/// The largest f16 <= v, as bits.
OCTAVO_INLINE i32x8 f16_down(f32x8 v) {
  uint16_t h[8];
  store_f16(h, v);
  const i32x8 nearest = load_u16(h), above = load_f16(h) > v;
  // One step down is one more in magnitude for a negative number (-0 included), one less for a positive.
  const i32x8 step = ((nearest & set1i(0x8000)) != set1i(0)) | set1i(1);  // -1 or 1
  return nearest - (step & above);
}

/// Scales at or above `needed` to p, no smaller than the smallest f16, and as f32 over `needed`. n is a multiple of 8.
OCTAVO_INLINE bool store_scales(float* needed, size_t n, uint8_t* p) {
  i32x8 top = set1i(0);
  for (size_t i = 0; i < n; i += 8) {
    const i32x8 h = max(f16_up(loadf(needed + i)), set1i(1));
    top = max(top, h);
    pin(top);
    store_u16(p + 2 * i, h);
    store(needed + i, load_f16(p + 2 * i));
  }
  return hmax(top) < 0x7c00;
}

/// Integer codes of eight values, |v| < 2^22, ties to even.
OCTAVO_INLINE i32x8 code_of(f32x8 v) { return round_to_int(v); }

CodecStatus encode_f16(const float* x, size_t n, uint8_t* out) {
  f32x8 top = set1(0);
  for (size_t i = 0; i < n; i += 8) {
    const f32x8 v = loadf(x + i);
    top = max(top, abs(v));
    pin(top);
    store_f16(out + 2 * i, v);
  }
  return hmax(top) < 65520.0f ? CodecStatus::ok : CodecStatus::value_range;
}

CodecStatus encode_bf16(const float* x, size_t n, uint8_t* out) {
  i32x8 top = set1i(0);
  for (size_t i = 0; i < n; i += 8) {
    const u32x8 u = load<u32x8>(x + i);
    const i32x8 h = bits<i32x8>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
    top = max(top, h & set1i(0x7fff));
    pin(top);
    store_u16(out + 2 * i, h);
  }
  return hmax(top) < 0x7f80 ? CodecStatus::ok : CodecStatus::value_range;
}

/// Scale and minimum of every row and group of x [rows][columns] to their bytes, and as stored to scale and minimum,
/// [groups][rows].
CodecStatus fit_affine(const float* x, size_t rows, size_t columns, float levels, float* scale, float* minimum,
                       uint8_t* scales, uint8_t* minima) {
  const size_t n = rows * ceil_div(columns, kAffineGroup);
  for (size_t r = 0; r < rows; ++r)
    for (size_t c = 0; c < columns; c += kAffineGroup) {
      const float* v = x + r * columns;
      const size_t end = min_of(columns, c + kAffineGroup);
      f32x8 low = loadf(v + c), high = low;
      for (size_t i = c + 8; i < end; i += 8) {
        low = min(low, loadf(v + i));
        high = max(high, loadf(v + i));
        pin(low);
        pin(high);
      }
      minimum[c / kAffineGroup * rows + r] = -hmax(-low);
      scale[c / kAffineGroup * rows + r] = hmax(high);
    }
  i32x8 top = set1i(0);
  for (size_t i = 0; i < n; i += 8) {
    // -0 becomes +0: which of the two was found depends on the order.
    const f32x8 low = loadf(minimum + i) + set1(0.0f);
    const i32x8 h = f16_down(low);
    top = max(top, h & set1i(0x7fff));
    pin(top);
    store_u16(minima + 2 * i, h);
    const f32x8 stored = load_f16(minima + 2 * i);
    store(minimum + i, stored);
    store(scale + i, (loadf(scale + i) - stored) / set1(levels) + set1(0.0f));
  }
  if (hmax(top) >= 0x7c00) return CodecStatus::minimum_range;
  return store_scales(scale, n, scales) ? CodecStatus::ok : CodecStatus::scale_range;
}

/// x [rows][columns] to codes of `kBits` bits. work: room for all scales and minima.
template <int kBits>
CodecStatus encode_affine(const PlaneShape& s, Role role, const float* x, float* work, uint8_t* codes, uint8_t* scales,
                          uint8_t* minima) {
  constexpr float levels = (1 << kBits) - 1;
  const size_t rows = n_rows(s, role), columns = n_columns(s, role);
  float *scale = work, *minimum = work + rows * ceil_div(columns, kAffineGroup);
  const CodecStatus status = fit_affine(x, rows, columns, levels, scale, minimum, scales, minima);
  if (status != CodecStatus::ok) return status;
  const auto code = [&](size_t r, size_t c) {
    const size_t at = c / kAffineGroup * rows + r;
    const f32x8 steps = (loadf(x + r * columns + c) - set1(minimum[at])) / set1(scale[at]);
    return code_of(min(max(steps, set1(0.0f)), set1(levels)));
  };
  for (size_t r = 0; r < rows; r += 2)
    for_tiles<2>(columns, [&]<int N>(size_t c) {
      // Columns c .. of the two rows in turn, 16 bits each; less the middle, in kBits of two's complement.
      const auto pairs = [&](size_t i) {
        return bits<u16x16>(code(r, c + 8 * i) | code(r + 1, c + 8 * i) << 16) ^ uint16_t{1 << (kBits - 1)};
      };
      uint8_t* out = codes + (r * columns + 2 * c) * kBits / 8;
      if constexpr (kBits == 8) {
        for (size_t i = 0; i < N; ++i) store(out + 16 * i, __builtin_convertvector(pairs(i), u8x16));
      } else if constexpr (N == 2) {
        store(out, __builtin_convertvector(pairs(0) | pairs(1) << 4, u8x16));
      } else {
        uint16_t v[16];
        store(v, pairs(0));
        store(out, __builtin_convertvector(load<u16x8>(v) | load<u16x8>(v + 8) << 4, u8x8));
      }
    });
  return CodecStatus::ok;
}

size_t plane_bytes(const PlaneShape& shape, Coding coding) {
  return shape.n_heads * (code_bytes(shape, coding.codec) + 4 * n_scales(shape, coding));
}

CodecStatus encode_head(const PlaneShape& shape, Coding coding, size_t head, const float* x, float* scratch,
                        uint8_t* plane) {
  const size_t n = shape.page_size * shape.head_dim;
  if (!all_finite(x, n)) return CodecStatus::not_finite;
  float* work = scratch + n;
  if (coding.rotated) {
    if (coding.role == Role::key) {
      rotate_columns(x, scratch, shape.head_dim, shape.page_size);
    } else {
      for (size_t i = 0; i < n; i += shape.head_dim) rotate_row(x + i, scratch + i, shape.head_dim);
    }
    if (!all_finite(scratch, n)) return CodecStatus::rotation_overflow;
    x = scratch;
  }
  const HeadParts parts = head_parts(shape, coding, head);
  uint8_t *codes = plane + parts.codes, *scales = plane + parts.scales;
  switch (coding.codec) {
    case CodecId::f32: __builtin_memcpy(codes, x, n * sizeof(float)); return CodecStatus::ok;
    case CodecId::f16: return encode_f16(x, n, codes);
    case CodecId::bf16: return encode_bf16(x, n, codes);
    case CodecId::int8:
      return encode_affine<8>(shape, coding.role, x, work, codes, scales, plane + parts.minima);
    case CodecId::int4:
      return encode_affine<4>(shape, coding.role, x, work, codes, scales, plane + parts.minima);
  }
  __builtin_unreachable();
}

CodecStatus decode_affine(const PlaneShape& shape, Coding coding, size_t head, const uint8_t* plane, float* scratch,
                          float* out) {
  AffineTerms terms;
  if (!read_terms(shape, coding, head, plane, &terms)) return CodecStatus::bad_scale;
  const size_t rows = n_rows(shape, coding.role), columns = n_columns(shape, coding.role);
  const size_t n = n_scales(shape, coding);
  float *scale = scratch, *minimum = scratch + n;
  for (size_t i = 0; i < n; i += 8) {
    store(scale + i, load_f16(terms.scales + 2 * i));
    store(minimum + i, load_f16(terms.minima + 2 * i));
  }
  with_codes(shape, coding, head, plane, [&](const auto& reader) {
    for_tiles<2>(columns, [&]<int N>(size_t c) {
      auto cursor = reader.template at<N>(0, c);
      for (size_t r = 0; r < rows; r += 2, cursor.next())
        for (int i = 0; i < N; ++i) {
          const size_t column = c + 8 * static_cast<size_t>(i), at = column / kAffineGroup * rows + r;
          const i32x8 pair = bits<i32x8>(cursor.get(i));
          // code * scale is exact, so that a fused operation gives the same bits as two.
          const auto value = [&](i32x8 code, size_t k) {
            return fma(to_f32(code + set1i(middle(coding.codec))), set1(scale[k]), set1(minimum[k]));
          };
          store(out + r * columns + column, value(pair << 16 >> 16, at));
          store(out + (r + 1) * columns + column, value(pair >> 16, at + 1));
        }
    });
  });
  return CodecStatus::ok;
}

CodecStatus decode_head(const PlaneShape& shape, Coding coding, size_t head, const uint8_t* plane, float* scratch,
                        float* out) {
  if (is_affine(coding.codec)) return decode_affine(shape, coding, head, plane, scratch, out);
  const size_t rows = n_rows(shape, coding.role), columns = n_columns(shape, coding.role);
  with_values(shape, coding, head, plane,
              [&](const auto& reader) { read_values(reader, rows, columns, plane, out); });
  return CodecStatus::ok;
}

void rotate_rows(float* x, size_t n, size_t head_dim) {
  for (size_t i = 0; i < n; ++i) rotate_row(x + i * head_dim, x + i * head_dim, head_dim);
}

}  // namespace

CodecKernels codec_kernels() {
  return {.plane_bytes = plane_bytes,
          .encode_head = encode_head,
          .decode_head = decode_head,
          .rotate_rows = rotate_rows};
}

}  // namespace octavo::OCTAVO_ISA
