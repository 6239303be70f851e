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

// Codes come out as 16-bit lanes, two inputs of a row side by side, as pairwise multiply-add reads them. A group is read in
// four rounds of four steps: round n gives inputs (0, 2) and (1, 3) of quad n, then of quad n + 4. Activations lie in the
// same order (ActGroup). A Codes object is the state of the rounds.

/// Scales of one group for eight rows: weight = d * code + m, or for Q6_K the scales of its two halves.
struct GroupScale {
  f32x8 d, m;
};

/// 128 bytes a group: unsigned 0..15.
struct Codes4 {
  static constexpr size_t kBytes = 128;
  const uint8_t* p;

  OCTAVO_MEMBER explicit Codes4(const uint8_t* group) : p(group) {}
  template <int kStep>
  OCTAVO_MEMBER i16x16 step() const {
    const u16x16 v = load<u16x16>(p);
    if constexpr (kStep == 0) return bits<i16x16>(v & 15);
    if constexpr (kStep == 1) return bits<i16x16>((v >> 8) & 15);
    if constexpr (kStep == 2) return bits<i16x16>((v >> 4) & 15);
    return bits<i16x16>(v >> 12);
  }
  OCTAVO_MEMBER void next() { p += 32; }
};

// Codes of five and six bits: a byte's low four bits from the four-bit plane, the rest from planes that move by one or two
// bits a round. Shifts are of 16-bit lanes: what they carry from byte to byte stays above the bits that are read.

/// 160 bytes a group: the fifth bits of all eight quads (bit q of byte 4r + j), then the four-bit plane. Unsigned 0..31.
struct Codes5 {
  static constexpr size_t kBytes = 160;
  const uint8_t* p;
  u16x16 fifth;

  OCTAVO_MEMBER explicit Codes5(const uint8_t* group) : p(group + 32), fifth(load<u16x16>(group)) {}
  template <int kStep>
  OCTAVO_MEMBER i16x16 step() const {
    const u16x16 v = load<u16x16>(p);
    const u16x16 code = kStep < 2 ? (v & 0x0f0f) | ((fifth & 0x0101) << 4) : ((v >> 4) & 0x0f0f) | (fifth & 0x1010);
    return bits<i16x16>(kStep % 2 ? code >> 8 : code & 0xff);
  }
  OCTAVO_MEMBER void next() {
    p += 32;
    fifth >>= 1;
  }
};

/// 192 bytes a group: two planes of two bits (quads 0..3, then 4..7), then the four-bit plane. Unsigned 0..63.
struct Codes6 {
  static constexpr size_t kBytes = 192;
  const uint8_t* p;
  u16x16 low, high;

  OCTAVO_MEMBER explicit Codes6(const uint8_t* group)
      : p(group + 64), low(load<u16x16>(group)), high(load<u16x16>(group + 32)) {}
  template <int kStep>
  OCTAVO_MEMBER i16x16 step() const {
    const u16x16 v = load<u16x16>(p);
    const u16x16 code =
        kStep < 2 ? (v & 0x0f0f) | ((low & 0x0303) << 4) : ((v >> 4) & 0x0f0f) | ((high & 0x0303) << 4);
    return bits<i16x16>(kStep % 2 ? code >> 8 : code & 0xff);
  }
  OCTAVO_MEMBER void next() {
    p += 32;
    low >>= 2;
    high >>= 2;
  }
};

/// 256 bytes a group: signed bytes.
struct Codes8 {
  static constexpr size_t kBytes = 256;
  const uint8_t* p;

  OCTAVO_MEMBER explicit Codes8(const uint8_t* group) : p(group) {}
  template <int kStep>
  OCTAVO_MEMBER i16x16 step() const {
    const i16x16 v = load<i16x16>(p + kStep / 2 * 128);
    return kStep % 2 ? v >> 8 : (v << 8) >> 8;
  }
  OCTAVO_MEMBER void next() { p += 32; }
};

// ---- types: a tile's header, its groups' scales, and the code of the weight zero ----

struct FormatQ4_0 {
  using Codes = Codes4;
  static constexpr size_t kGroups = 1, kHeader = 16;
  static constexpr int kZero = 8;
  static constexpr bool kHasMin = false, kHalves = false;
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
  static constexpr bool kHasMin = true, kHalves = false;
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
  static constexpr bool kHasMin = true, kHalves = false;
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
  static constexpr bool kHasMin = false, kHalves = true;
  struct Header {
    f32x8 d;
  };
  OCTAVO_INLINE Header header(const uint8_t* t) { return {load_f16(t)}; }
  OCTAVO_INLINE GroupScale scale(const Header& h, const uint8_t* t, size_t g) {
    return {h.d * to_f32(load_i8(t + 16 + 16 * g)), h.d * to_f32(load_i8(t + 24 + 16 * g))};
  }
};

/// The place of a part of a product: `rows` batch rows and `blocks` output blocks further on.
OCTAVO_INLINE LinearOutput further(const LinearOutput& to, size_t rows, size_t blocks) {
  const size_t r = kBlockRows * blocks;
  return {to.out + rows * to.stride + r, to.stride, to.bias == nullptr ? nullptr : to.bias + r, to.add};
}

/// Writes acc[j][i], block b + j and batch row i, to its place; rows past the matrix's last are left out.
/// The first n lanes of y to their place.
static __attribute__((noinline)) void write_tail(float* out, const float* bias, bool add, f32x8 y, size_t n) {
  if (bias != nullptr) y += load_partial(bias, n);
  if (add) y += load_partial(out, n);
  store_partial(out, y, n);
}

template <int kRows, int kBlocks>
OCTAVO_INLINE void write(const f32x8 (&acc)[kBlocks][kRows], const PackedMatrix& w, size_t b, const LinearOutput& to) {
  unroll<kBlocks>([&](auto j) OCTAVO_BODY {
    const size_t n = min_of(kBlockRows, w.rows - kBlockRows * (b + j));
    const float* bias = to.bias == nullptr ? nullptr : to.bias + kBlockRows * j;
    unroll<kRows>([&](auto i) OCTAVO_BODY {
      float* out = to.out + i * to.stride + kBlockRows * j;
      f32x8 y = acc[j][i];
      if (n == kBlockRows) {
        if (bias != nullptr) y += loadf(bias);
        if (to.add) y += loadf(out);
        store(out, y);
      } else {
        write_tail(out, bias, to.add, y, n);
      }
    });
  });
}

template <class F>
constexpr size_t tile_bytes() {
  return F::kHeader + F::kGroups * F::Codes::kBytes;
}

}  // namespace octavo::OCTAVO_ISA
