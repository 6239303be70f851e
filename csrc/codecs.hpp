// The page codecs as kernels see them. Layouts: docs/byte-layouts.md. The numpy code in octavo.codecs is the
// definition; these write the same bytes.
//
// Read by kernel sources too: plain data only, no code.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace octavo {

/// The codecs' `kernel_id`.
enum class CodecId : uint8_t { f32 = 0, f16 = 1, bf16 = 2, int8 = 3, int4 = 4 };
inline constexpr int kCodecs = 5;

enum class Role : uint8_t { key, value };

/// How a plane is written. `rotated`: the stored values are in the Hadamard basis.
struct Coding {
  CodecId codec;
  Role role;
  bool rotated;
};

/// Of a PlaneShape. The integer sums of attention_multiply.hpp end here.
inline constexpr size_t kMaxPageSize = 128;
inline constexpr size_t kMaxHeadDim = 1016;

struct PlaneShape {
  size_t page_size;
  size_t n_heads;
  size_t head_dim;
};

enum class CodecStatus : uint8_t {
  ok,
  not_finite,         ///< a value to encode is NaN or infinite
  rotation_overflow,  ///< a value overflows when rotated
  value_range,        ///< a value is beyond the stored type
  minimum_range,      ///< a minimum is beyond float16
  scale_range,        ///< a scale is beyond float16
  bad_scale,          ///< a stored scale or minimum is no number, or a scale is not positive
};

/// One head at a time. A head's values are f32 in stored order: keys [head_dim][page_size], values
/// [page_size][head_dim]. page_size is a multiple of 16, head_dim of 8. `plane` is the whole plane's first byte.
struct CodecKernels {
  size_t (*plane_bytes)(const PlaneShape& shape, Coding coding);

  /// x in the plain basis. scratch: 2 * page_size * head_dim floats. Other heads' bytes are not touched.
  CodecStatus (*encode_head)(const PlaneShape& shape, Coding coding, size_t head, const float* x, float* scratch,
                             uint8_t* plane);

  /// out in the stored basis. scratch: page_size * head_dim floats.
  CodecStatus (*decode_head)(const PlaneShape& shape, Coding coding, size_t head, const uint8_t* plane, float* scratch,
                             float* out);

  /// The Hadamard transform of n rows of head_dim values, in place.
  void (*rotate_rows)(float* x, size_t n, size_t head_dim);
};

}  // namespace octavo
