// Stored weights -> kernel order, checks at load, and rows back to floats.
//
// A packed matrix is a run of blocks of eight rows. A block is a run of tiles along the inputs (linear_formats.hpp). With
// r a row of the block, j in 0..4 and q a quad of inputs (4q .. 4q+3 of a group of 32), byte 4r + j of a 32-byte vector
// belongs to input 4q + j:
//   four-bit plane, 128 bytes: vector v holds quad v in low and quad v + 4 in high nibbles
//   fifth bits, 32 bytes: bit q is the fifth bit of quad q's code
//   fifth and sixth bits, 2 x 32 bytes: vector h holds quads 4h .. 4h+3, two bits each
//   signed bytes, 256 bytes: vector q holds quad q
// Tiles, scales first:
//   Q4_0 16 + 128   Q4_1 32 + 128   Q5_0 16 + 32 + 128   Q5_1 32 + 32 + 128   Q8_0 16 + 256
//   Q4_K 160 + 8 x 128   Q5_K 160 + 8 x (32 + 128)   Q6_K 144 + 8 x (64 + 128)
//   F32, F16, BF16: for each input, eight values
#include <cmath>
#include <cstring>

#include "errors.hpp"
#include "linear.hpp"

namespace octavo {
namespace {

struct TypeInfo {
  const char* name;
  size_t block, bytes;  // stored: inputs per block, bytes per block
  size_t group, tile;   // packed: inputs per tile, bytes per tile of eight rows
};

constexpr TypeInfo kTypes[kTensorTypes] = {
    {"F32", 1, 4, 1, 32},          {"F16", 1, 2, 1, 16},
    {"BF16", 1, 2, 1, 16},         {"Q4_0", 32, 18, 32, 144},
    {"Q4_1", 32, 20, 32, 160},     {"Q5_0", 32, 22, 32, 176},
    {"Q5_1", 32, 24, 32, 192},     {"Q8_0", 32, 34, 32, 272},
    {"Q4_K", 256, 144, 256, 1184}, {"Q5_K", 256, 176, 256, 1440},
    {"Q6_K", 256, 210, 256, 1680},
};

const TypeInfo& info(TensorType type) { return kTypes[static_cast<size_t>(type)]; }

template <class T>
T read(const uint8_t* p) {
  T v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

float f16_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(h & 0x7fff) << 13;
  float f;
  if ((h & 0x7c00) == 0x7c00) {
    const uint32_t bits = sign | magnitude | 0x7f800000;
    std::memcpy(&f, &bits, 4);
    return f;
  }
  std::memcpy(&f, &magnitude, 4);
  f *= 0x1p112f;  // exponent bias 15 -> 127; normalizes subnormals
  return sign ? -f : f;
}

float f16_at(const uint8_t* p) { return f16_to_float(read<uint16_t>(p)); }
bool f16_finite(const uint8_t* p) { return (read<uint16_t>(p) & 0x7c00) != 0x7c00; }

// Scale and minimum (6 bits each) of eight groups from the 12 bytes of a Q4_K or Q5_K block.
void k_scales(const uint8_t* p, uint8_t scale[8], uint8_t min[8]) {
  for (int g = 0; g < 4; ++g) {
    scale[g] = p[g] & 63;
    min[g] = p[4 + g] & 63;
    scale[4 + g] = static_cast<uint8_t>((p[8 + g] & 15) | (p[g] >> 6 << 4));
    min[4 + g] = static_cast<uint8_t>((p[8 + g] >> 4) | (p[4 + g] >> 6 << 4));
  }
}

// Codes of group g (32 inputs) of a stored block as unsigned bytes (Q8_0: signed ones as they are).
void group_codes(TensorType type, const uint8_t* p, size_t g, uint8_t code[32]) {
  switch (type) {
    case TensorType::Q4_0:
    case TensorType::Q4_1: {
      const uint8_t* q = p + (type == TensorType::Q4_0 ? 2 : 4);
      for (int i = 0; i < 16; ++i) code[i] = q[i] & 15, code[16 + i] = q[i] >> 4;
      return;
    }
    case TensorType::Q5_0:
    case TensorType::Q5_1: {
      const uint8_t* h = p + (type == TensorType::Q5_0 ? 2 : 4);
      const uint32_t high = read<uint32_t>(h);
      const uint8_t* q = h + 4;
      for (int i = 0; i < 16; ++i) {
        code[i] = static_cast<uint8_t>((q[i] & 15) | ((high >> i & 1) << 4));
        code[16 + i] = static_cast<uint8_t>((q[i] >> 4) | ((high >> (16 + i) & 1) << 4));
      }
      return;
    }
    case TensorType::Q8_0: std::memcpy(code, p + 2, 32); return;
    case TensorType::Q4_K:
    case TensorType::Q5_K: {
      // 32 bytes hold two groups, in low and in high nibbles; the fifth bit of group g is bit g of 32 bytes.
      const bool five = type == TensorType::Q5_K;
      const uint8_t* h = p + 16;
      const uint8_t* q = p + (five ? 48 : 16) + g / 2 * 32;
      const int shift = g % 2 ? 4 : 0;
      for (int i = 0; i < 32; ++i) {
        code[i] = static_cast<uint8_t>(q[i] >> shift & 15);
        if (five) code[i] = static_cast<uint8_t>(code[i] | (h[i] >> g & 1) << 4);
      }
      return;
    }
    case TensorType::Q6_K: {
      // 128 inputs at a time: 64 bytes with groups 0, 1 in low and 2, 3 in high nibbles; 32 bytes with two bits of each.
      const size_t half = g / 4, part = g % 4;
      const uint8_t* q = p + half * 64 + part % 2 * 32;
      const uint8_t* h = p + 128 + half * 32;
      const int shift = part < 2 ? 0 : 4;
      for (int i = 0; i < 32; ++i)
        code[i] = static_cast<uint8_t>((q[i] >> shift & 15) | (h[i] >> (2 * part) & 3) << 4);
      return;
    }
    default: throw std::logic_error("group_codes: not a quantized type");
  }
}

// The low four bits of a row's codes in the four-bit plane.
void put_nibbles(const uint8_t code[32], size_t r, uint8_t* plane) {
  uint8_t byte[16];
  for (int i = 0; i < 16; ++i) byte[i] = static_cast<uint8_t>((code[i] & 15) | code[16 + i] << 4);
  for (size_t v = 0; v < 4; ++v) std::memcpy(plane + 32 * v + 4 * r, byte + 4 * v, 4);
}

void put_group(TensorType type, const uint8_t code[32], size_t r, uint8_t* to) {
  switch (type) {
    case TensorType::Q8_0:
      for (size_t q = 0; q < 8; ++q) std::memcpy(to + 32 * q + 4 * r, code + 4 * q, 4);
      return;
    case TensorType::Q5_0:
    case TensorType::Q5_1:
    case TensorType::Q5_K: {
      uint8_t bits[4] = {0, 0, 0, 0};
      for (int q = 0; q < 8; ++q)
        for (int j = 0; j < 4; ++j) bits[j] = static_cast<uint8_t>(bits[j] | (code[4 * q + j] >> 4) << q);
      std::memcpy(to + 4 * r, bits, 4);
      put_nibbles(code, r, to + 32);
      return;
    }
    case TensorType::Q6_K: {
      uint8_t bits[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
      for (int q = 0; q < 8; ++q)
        for (int j = 0; j < 4; ++j)
          bits[q / 4][j] = static_cast<uint8_t>(bits[q / 4][j] | (code[4 * q + j] >> 4) << (2 * (q % 4)));
      std::memcpy(to + 4 * r, bits[0], 4);
      std::memcpy(to + 32 + 4 * r, bits[1], 4);
      put_nibbles(code, r, to + 64);
      return;
    }
    default: put_nibbles(code, r, to);
  }
}

// One stored block of row r into its tile.
void put_block(TensorType type, const uint8_t* p, size_t r, uint8_t* tile) {
  uint8_t code[32];
  switch (type) {
    case TensorType::Q4_1:
    case TensorType::Q5_1:
      std::memcpy(tile + 2 * r, p, 2);
      std::memcpy(tile + 16 + 2 * r, p + 2, 2);
      group_codes(type, p, 0, code);
      put_group(type, code, r, tile + 32);
      return;
    case TensorType::Q4_K:
    case TensorType::Q5_K: {
      std::memcpy(tile + 2 * r, p, 2);
      const uint16_t minus_min = read<uint16_t>(p + 2) ^ 0x8000;
      std::memcpy(tile + 16 + 2 * r, &minus_min, 2);
      uint8_t scale[8], min[8];
      k_scales(p + 4, scale, min);
      const size_t bytes = type == TensorType::Q4_K ? 128 : 160;
      for (size_t g = 0; g < 8; ++g) {
        tile[32 + 8 * g + r] = scale[g];
        tile[96 + 8 * g + r] = min[g];
        group_codes(type, p, g, code);
        put_group(type, code, r, tile + 160 + bytes * g);
      }
      return;
    }
    case TensorType::Q6_K:
      std::memcpy(tile + 2 * r, p + 208, 2);
      for (size_t h = 0; h < 16; ++h) tile[16 + 8 * h + r] = p[192 + h];
      for (size_t g = 0; g < 8; ++g) {
        group_codes(type, p, g, code);
        put_group(type, code, r, tile + 144 + 192 * g);
      }
      return;
    default:
      std::memcpy(tile + 2 * r, p, 2);
      group_codes(type, p, 0, code);
      put_group(type, code, r, tile + 16);
  }
}

// Whether every scale (or float weight) of a stored row is finite.
bool row_finite(TensorType type, const uint8_t* p, size_t cols) {
  const size_t n = cols / info(type).block, bytes = info(type).bytes;
  bool ok = true;
  switch (type) {
    case TensorType::F32:
      for (size_t i = 0; i < n; ++i) ok &= (read<uint32_t>(p + 4 * i) & 0x7f800000) != 0x7f800000;
      return ok;
    case TensorType::F16:
      for (size_t i = 0; i < n; ++i) ok &= f16_finite(p + 2 * i);
      return ok;
    case TensorType::BF16:
      for (size_t i = 0; i < n; ++i) ok &= (read<uint16_t>(p + 2 * i) & 0x7f80) != 0x7f80;
      return ok;
    case TensorType::Q4_1:
    case TensorType::Q5_1:
    case TensorType::Q4_K:
    case TensorType::Q5_K:
      for (size_t i = 0; i < n; ++i) ok &= f16_finite(p + bytes * i) && f16_finite(p + bytes * i + 2);
      return ok;
    case TensorType::Q6_K:
      for (size_t i = 0; i < n; ++i) ok &= f16_finite(p + bytes * i + 208);
      return ok;
    default:
      for (size_t i = 0; i < n; ++i) ok &= f16_finite(p + bytes * i);
      return ok;
  }
}

void dequantize_block(TensorType type, const uint8_t* p, float* out) {
  uint8_t code[32];
  const size_t groups = info(type).block / 32;
  for (size_t g = 0; g < groups; ++g, out += 32) {
    group_codes(type, p, g, code);
    switch (type) {
      case TensorType::Q4_0:
      case TensorType::Q5_0: {
        const float d = f16_at(p);
        const int zero = type == TensorType::Q4_0 ? 8 : 16;
        for (int i = 0; i < 32; ++i) out[i] = d * static_cast<float>(code[i] - zero);
        break;
      }
      case TensorType::Q4_1:
      case TensorType::Q5_1: {
        const float d = f16_at(p), m = f16_at(p + 2);
        for (int i = 0; i < 32; ++i) out[i] = d * static_cast<float>(code[i]) + m;
        break;
      }
      case TensorType::Q8_0: {
        const float d = f16_at(p);
        for (int i = 0; i < 32; ++i) out[i] = d * static_cast<float>(static_cast<int8_t>(code[i]));
        break;
      }
      case TensorType::Q4_K:
      case TensorType::Q5_K: {
        uint8_t scale[8], min[8];
        k_scales(p + 4, scale, min);
        const float d = f16_at(p) * scale[g], m = f16_at(p + 2) * min[g];
        for (int i = 0; i < 32; ++i) out[i] = d * static_cast<float>(code[i]) - m;
        break;
      }
      case TensorType::Q6_K: {
        const float d = f16_at(p + 208);
        for (int i = 0; i < 32; ++i) {
          const auto scale = static_cast<int8_t>(p[192 + 2 * g + static_cast<size_t>(i) / 16]);
          out[i] = d * scale * static_cast<float>(code[i] - 32);
        }
        break;
      }
      default: throw std::logic_error("dequantize_block: not a quantized type");
    }
  }
}

std::string describe(const TensorView& t) {
  return "tensor " + t.name + " (" + tensor_type_name(t.type) + " [" + std::to_string(t.rows) + ", " +
         std::to_string(t.cols) + "])";
}

}  // namespace

const char* tensor_type_name(TensorType type) { return info(type).name; }

TensorType parse_tensor_type(std::string_view name, std::string_view tensor) {
  for (int i = 0; i < kTensorTypes; ++i)
    if (name == kTypes[i].name) return static_cast<TensorType>(i);
  std::string known;
  for (const TypeInfo& t : kTypes) known += std::string(known.empty() ? "" : ", ") + t.name;
  throw UnsupportedError("tensor " + std::string(tensor) + " has type " + std::string(name) +
                         "; the cpu backend reads " + known);
}

size_t stored_row_bytes(TensorType type, size_t cols) { return cols / info(type).block * info(type).bytes; }

size_t packed_block_bytes(TensorType type, size_t cols) { return cols / info(type).group * info(type).tile; }

const uint8_t* TensorView::row(size_t i) const {
  const size_t stored = row_order == nullptr ? i : static_cast<size_t>(row_order[i]);
  return data + stored * stored_row_bytes(type, cols);
}

void check_tensor(Context& context, const TensorView& t) {
  if (t.rows == 0 || t.cols == 0) throw LoadError(describe(t) + " is empty");
  if (t.cols % info(t.type).block != 0)
    throw LoadError(describe(t) + ": columns must be a multiple of " + std::to_string(info(t.type).block));
  const size_t want = t.rows * stored_row_bytes(t.type, t.cols);
  if (t.bytes != want)
    throw LoadError(describe(t) + " has " + std::to_string(t.bytes) + " bytes, expected " + std::to_string(want));
  if (t.row_order != nullptr)
    for (size_t i = 0; i < t.rows; ++i)
      if (t.row_order[i] < 0 || static_cast<size_t>(t.row_order[i]) >= t.rows)
        throw LoadError(describe(t) + ": row_order[" + std::to_string(i) + "] = " + std::to_string(t.row_order[i]));
  const size_t row_bytes = stored_row_bytes(t.type, t.cols);
  const size_t chunk = 1 + (size_t{1} << 18) / row_bytes;
  context.pool.parallel_for((t.rows + chunk - 1) / chunk, [&](size_t task, int) {
    for (size_t i = task * chunk; i < std::min(t.rows, (task + 1) * chunk); ++i)
      if (!row_finite(t.type, t.data + i * row_bytes, t.cols))
        throw LoadError(describe(t) + ": stored row " + std::to_string(i) +
                        " has a NaN or infinite scale or weight; the file is damaged or was written wrongly");
  });
}

void dequantize_row(const TensorView& t, size_t i, float* out) {
  const uint8_t* p = t.row(i);
  switch (t.type) {
    case TensorType::F32: std::memcpy(out, p, 4 * t.cols); return;
    case TensorType::F16:
      for (size_t k = 0; k < t.cols; ++k) out[k] = f16_at(p + 2 * k);
      return;
    case TensorType::BF16:
      for (size_t k = 0; k < t.cols; ++k) {
        const uint32_t bits = static_cast<uint32_t>(read<uint16_t>(p + 2 * k)) << 16;
        std::memcpy(out + k, &bits, 4);
      }
      return;
    default:
      for (size_t k = 0; k < t.cols; k += info(t.type).block, p += info(t.type).bytes)
        dequantize_block(t.type, p, out + k);
  }
}

void pack_blocks(const TensorView& t, size_t b0, size_t b1, uint8_t* out) {
  const TypeInfo& type = info(t.type);
  const size_t block_bytes = packed_block_bytes(t.type, t.cols);
  for (size_t b = b0; b < b1; ++b, out += block_bytes) {
    for (size_t r = 0; r < std::min(kBlockRows, t.rows - b * kBlockRows); ++r) {
      const uint8_t* p = t.row(b * kBlockRows + r);
      if (is_float(t.type)) {
        for (size_t k = 0; k < t.cols; ++k) std::memcpy(out + (k * kBlockRows + r) * type.bytes, p + k * type.bytes, type.bytes);
      } else {
        for (size_t k = 0; k < t.cols / type.block; ++k) put_block(t.type, p + k * type.bytes, r, out + k * type.tile);
      }
    }
  }
}

}  // namespace octavo
