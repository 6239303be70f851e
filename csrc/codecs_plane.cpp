#include "codecs_plane.hpp"

#include <stdexcept>

#include "errors.hpp"

namespace octavo {
namespace {

constexpr int kSlotHead = kSlotAttention;

// Element (token, channel) of a head in stored order.
size_t stored_index(const PlaneShape& s, Role role, size_t token, size_t channel) {
  return role == Role::key ? channel * s.page_size + token : token * s.head_dim + channel;
}

}  // namespace

const char* codec_name(CodecId codec) {
  switch (codec) {
    case CodecId::f32: return "f32";
    case CodecId::f16: return "f16";
    case CodecId::bf16: return "bf16";
    case CodecId::int8: return "int8";
    case CodecId::int4: return "int4";
  }
  throw std::invalid_argument("no codec has the kernel id " + std::to_string(static_cast<int>(codec)));
}

std::string codec_error(Coding coding, size_t head, CodecStatus status) {
  const char* what = "";
  switch (status) {
    case CodecStatus::ok: break;
    case CodecStatus::not_finite: what = "a value is NaN or infinite"; break;
    case CodecStatus::rotation_overflow: what = "a value overflows when rotated"; break;
    case CodecStatus::value_range: what = "a value is beyond the range of the stored type"; break;
    case CodecStatus::minimum_range: what = "a minimum is beyond the range of float16 (65504)"; break;
    case CodecStatus::scale_range: what = "a scale is beyond the range of float16 (65504)"; break;
    case CodecStatus::bad_scale: what = "a stored scale is not a positive number"; break;
  }
  return std::string(codec_name(coding.codec)) + " cannot hold the " +
         (coding.role == Role::key ? "key" : "value") + " of head " + std::to_string(head) + ": " + what;
}

void check_shape(const PlaneShape& s) {
  if (s.page_size == 0 || s.page_size % 16 != 0 || s.page_size > kMaxPageSize)
    throw std::invalid_argument("page_size must be a multiple of 16 up to " + std::to_string(kMaxPageSize) +
                                ", got " + std::to_string(s.page_size));
  if (s.head_dim == 0 || s.head_dim % 8 != 0 || s.head_dim > kMaxHeadDim)
    throw std::invalid_argument("head_dim must be a multiple of 8 up to " + std::to_string(kMaxHeadDim) +
                                ", got " + std::to_string(s.head_dim));
  if (s.n_heads == 0) throw std::invalid_argument("n_heads must be positive");
}

void encode_plane(Context& context, const PlaneShape& s, Coding coding, const float* x, uint8_t* plane) {
  const size_t n = s.page_size * s.head_dim;
  float* head = context.scratch.take<float>(kSlotHead, 3 * n);
  for (size_t h = 0; h < s.n_heads; ++h) {
    for (size_t t = 0; t < s.page_size; ++t)
      for (size_t c = 0; c < s.head_dim; ++c)
        head[stored_index(s, coding.role, t, c)] = x[(t * s.n_heads + h) * s.head_dim + c];
    const CodecStatus status = context.kernels.codecs.encode_head(s, coding, h, head, head + n, plane);
    if (status != CodecStatus::ok) throw CodecRangeError(codec_error(coding, h, status));
  }
}

void decode_plane(Context& context, const PlaneShape& s, Coding coding, const uint8_t* plane, float* x) {
  const size_t n = s.page_size * s.head_dim;
  float* head = context.scratch.take<float>(kSlotHead, 3 * n);
  for (size_t h = 0; h < s.n_heads; ++h) {
    const CodecStatus status = context.kernels.codecs.decode_head(s, coding, h, plane, head + n, head);
    if (status != CodecStatus::ok) throw CodecRangeError(codec_error(coding, h, status));
    for (size_t t = 0; t < s.page_size; ++t) {
      float* row = x + (t * s.n_heads + h) * s.head_dim;
      for (size_t c = 0; c < s.head_dim; ++c) row[c] = head[stored_index(s, coding.role, t, c)];
    }
  }
  if (coding.rotated) context.kernels.codecs.rotate_rows(x, s.page_size * s.n_heads, s.head_dim);
}

}  // namespace octavo
