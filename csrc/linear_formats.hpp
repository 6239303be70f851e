// How each packed weight type is read: codes of eight rows by four inputs per vector, and scales. Kernel sources only.
//
// A tile is what one step over the inputs reads: one group of 32 inputs, or eight groups (256 inputs) for the K types.
// Within a tile, quad q (inputs 4q .. 4q+3 of a group) of row r is lane r of a vector. Four-bit planes hold quad q in the
// low and quad q + 4 in the high nibbles of vector q, as linear_pack.cpp writes them.
#pragma once

#include "linear_types.hpp"
#include "simd.hpp"

namespace octavo::OCTAVO_ISA {

using u16x16 = uint16_t __attribute__((vector_size(32)));

OCTAVO_INLINE u8x32 low_nibbles(u8x32 v) { return v & set1u8(15); }
OCTAVO_INLINE u8x32 high_nibbles(u8x32 v) { return bits<u8x32>(bits<u16x16>(v) >> 4) & set1u8(15); }

/// Bit `from` of each byte, moved to bit 4. kWidth bits are moved together.
template <int kFrom, int kWidth>
OCTAVO_INLINE u8x32 high_bits(u8x32 plane) {
  const u8x32 picked = plane & set1u8(static_cast<uint8_t>(((1 << kWidth) - 1) << kFrom));
  if constexpr (kFrom < 4) return bits<u8x32>(bits<u16x16>(picked) << (4 - kFrom));
  return bits<u8x32>(bits<u16x16>(picked) >> (kFrom - 4));
}

/// Scales of one group for eight rows: weight = d * code + m.
struct GroupScale {
  f32x8 d, m;
};

// ---- planes of codes ----

/// 128 bytes a group: unsigned 0..15.
struct Codes4 {
  static constexpr size_t kBytes = 128;
  static constexpr int kPairsPerFlush = 4;  // a pair of quads adds at most 2 * 3810 to a 16-bit lane
  template <int kPair>
  OCTAVO_INLINE void pair(const uint8_t* p, u8x32& low, u8x32& high) {
    const u8x32 v = load<u8x32>(p + 32 * kPair);
    low = low_nibbles(v);
    high = high_nibbles(v);
  }
};

/// 160 bytes a group: the fifth bits of all eight quads (bit q of byte 4r + j), then the four-bit plane. Unsigned 0..31.
struct Codes5 {
  static constexpr size_t kBytes = 160;
  static constexpr int kPairsPerFlush = 2;  // at most 2 * 7874 a pair
  template <int kPair>
  OCTAVO_INLINE void pair(const uint8_t* p, u8x32& low, u8x32& high) {
    const u8x32 fifth = load<u8x32>(p), v = load<u8x32>(p + 32 + 32 * kPair);
    low = low_nibbles(v) | high_bits<kPair, 1>(fifth);
    high = high_nibbles(v) | high_bits<kPair + 4, 1>(fifth);
  }
};

/// 192 bytes a group: two planes of two bits (quads 0..3, then 4..7), then the four-bit plane. Unsigned 0..63.
struct Codes6 {
  static constexpr size_t kBytes = 192;
  template <int kPair>
  OCTAVO_INLINE void pair(const uint8_t* p, u8x32& low, u8x32& high) {
    const u8x32 v = load<u8x32>(p + 64 + 32 * kPair);
    low = low_nibbles(v) | high_bits<2 * kPair, 2>(load<u8x32>(p));
    high = high_nibbles(v) | high_bits<2 * kPair, 2>(load<u8x32>(p + 32));
  }
};

/// 256 bytes a group: signed bytes.
struct Codes8 {
  static constexpr size_t kBytes = 256;
};

// ---- types: a tile's header, its groups' scales, and the code that the file's zero has ----

struct FormatQ4_0 {
  using Codes = Codes4;
  static constexpr size_t kGroups = 1, kHeader = 16;
  static constexpr int kZero = 8;
  static constexpr bool kHasMin = false;
  struct Header {};
  OCTAVO_INLINE Header header(const uint8_t*) { return {}; }
  OCTAVO_INLINE GroupScale scale(const Header&, const uint8_t* t, size_t) { return {load_f16(t), set1(0)}; }
};

struct FormatQ5_0 : FormatQ4_0 {
  using Codes = Codes5;
  static constexpr int kZero = 16;
};

struct FormatQ8_0 : FormatQ4_0 {
  using Codes = Codes8;
  static constexpr int kZero = 0;
};

struct FormatQ4_1 {
  using Codes = Codes4;
  static constexpr size_t kGroups = 1, kHeader = 32;
  static constexpr int kZero = 0;
  static constexpr bool kHasMin = true;
  struct Header {};
  OCTAVO_INLINE Header header(const uint8_t*) { return {}; }
  OCTAVO_INLINE GroupScale scale(const Header&, const uint8_t* t, size_t) { return {load_f16(t), load_f16(t + 16)}; }
};

struct FormatQ5_1 : FormatQ4_1 {
  using Codes = Codes5;
};

/// Header: f16 d[8], f16 -dmin[8], then u8 scale[8 groups][8 rows], u8 min[8 groups][8 rows]. Products are exact in f32.
struct FormatQ4_K {
  using Codes = Codes4;
  static constexpr size_t kGroups = 8, kHeader = 160;
  static constexpr int kZero = 0;
  static constexpr bool kHasMin = true;
  struct Header {
    f32x8 d, minus_dmin;
  };
  OCTAVO_INLINE Header header(const uint8_t* t) { return {load_f16(t), load_f16(t + 16)}; }
  OCTAVO_INLINE GroupScale scale(const Header& h, const uint8_t* t, size_t g) {
    return {h.d * to_f32(load_u8(t + 32 + 8 * g)), h.minus_dmin * to_f32(load_u8(t + 96 + 8 * g))};
  }
};

struct FormatQ5_K : FormatQ4_K {
  using Codes = Codes5;
};

/// Header: f16 d[8], then i8 scale[16 half groups][8 rows].
struct FormatQ6_K {
  using Codes = Codes6;
  static constexpr size_t kGroups = 8, kHeader = 144;
  static constexpr int kZero = 32;
  struct Header {
    f32x8 d;
  };
  OCTAVO_INLINE Header header(const uint8_t* t) { return {load_f16(t)}; }
  /// Scale of half group h = 2 g + (0 or 1).
  OCTAVO_INLINE f32x8 scale(const Header& h, const uint8_t* t, size_t half) {
    return h.d * to_f32(load_i8(t + 16 + 8 * half));
  }
};

/// The place of a part of a product: `rows` batch rows and `blocks` output blocks further on.
OCTAVO_INLINE LinearOutput further(const LinearOutput& to, size_t rows, size_t blocks) {
  const size_t r = kBlockRows * blocks;
  return {to.out + rows * to.stride + r, to.stride, to.bias == nullptr ? nullptr : to.bias + r, to.add};
}

/// Writes acc[j][i], block b + j and batch row i, to its place; rows past the matrix's last are left out.
template <int kRows, int kBlocks>
OCTAVO_INLINE void write(const f32x8 (&acc)[kBlocks][kRows], const PackedMatrix& w, size_t b, const LinearOutput& to) {
  for (size_t j = 0; j < kBlocks; ++j) {
    const size_t n = min_of(kBlockRows, w.rows - kBlockRows * (b + j));
    const float* bias = to.bias == nullptr ? nullptr : to.bias + kBlockRows * j;
    for (size_t i = 0; i < kRows; ++i) {
      float* out = to.out + i * to.stride + kBlockRows * j;
      f32x8 y = acc[j][i];
      if (n == kBlockRows) {
        if (bias != nullptr) y += loadf(bias);
        if (to.add) y += loadf(out);
        store(out, y);
      } else {
        if (bias != nullptr) y += load_partial(bias, n);
        if (to.add) y += load_partial(out, n);
        store_partial(out, y, n);
      }
    }
  }
}

template <class F>
constexpr size_t tile_bytes() {
  return F::kHeader + F::kGroups * F::Codes::kBytes;
}

}  // namespace octavo::OCTAVO_ISA
