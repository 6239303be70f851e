// Whole planes, and what the codecs' errors say.
#pragma once

#include <string>

#include "context.hpp"

namespace octavo {

const char* codec_name(CodecId codec);

/// "int8 cannot hold the key of head 2: a value is NaN or infinite", as octavo.codecs words it.
std::string codec_error(Coding coding, size_t head, CodecStatus status);

/// x [page_size][n_heads][head_dim], plain basis -> the plane's bytes. Throws CodecRangeError.
void encode_plane(Context& context, const PlaneShape& shape, Coding coding, const float* x, uint8_t* plane);

/// The inverse, in the plain basis.
void decode_plane(Context& context, const PlaneShape& shape, Coding coding, const uint8_t* plane, float* x);

/// Throws std::invalid_argument unless kernels can work on planes of this shape.
void check_shape(const PlaneShape& shape);

}  // namespace octavo
