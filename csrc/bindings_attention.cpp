// Python bindings of the page codecs and of the attention block.
#include "bindings.hpp"
#include "codecs_plane.hpp"

namespace octavo {
namespace {

Coding coding_of(int codec, bool is_key, bool rotated) {
  if (codec < 0 || codec >= kCodecs) throw std::invalid_argument("no codec has the kernel id " + std::to_string(codec));
  return {static_cast<CodecId>(codec), is_key ? Role::key : Role::value, rotated};
}

}  // namespace

void bind_codecs(nb::module_& m) {
  m.def(
      "encode_plane",
      [](Context& context, int codec, bool is_key, bool rotated, Array x, ArrayRw plane) {
        const Coding coding = coding_of(codec, is_key, rotated);
        const float* values = in<float>(x, "x", {-1, -1, -1});
        const PlaneShape shape{x.shape(0), x.shape(1), x.shape(2)};
        check_shape(shape);
        const size_t bytes = context.kernels.codecs.plane_bytes(shape, coding);
        uint8_t* to = out<uint8_t>(plane, "plane", {static_cast<int64_t>(bytes)});
        run_locked(context, [&] { encode_plane(context, shape, coding, values, to); });
      },
      nb::arg("context"), nb::arg("codec"), nb::arg("is_key"), nb::arg("rotated"), nb::arg("x"), nb::arg("plane"),
      "Encode x, float32 [page_size, n_heads, head_dim], into plane, uint8 [bytes_per_page], as octavo.codecs does.");
  m.def(
      "decode_plane",
      [](Context& context, int codec, bool is_key, bool rotated, Array plane, ArrayRw x) {
        const Coding coding = coding_of(codec, is_key, rotated);
        float* values = out<float>(x, "x", {-1, -1, -1});
        const PlaneShape shape{x.shape(0), x.shape(1), x.shape(2)};
        check_shape(shape);
        const size_t bytes = context.kernels.codecs.plane_bytes(shape, coding);
        const uint8_t* from = in<uint8_t>(plane, "plane", {static_cast<int64_t>(bytes)});
        run_locked(context, [&] { decode_plane(context, shape, coding, from, values); });
      },
      nb::arg("context"), nb::arg("codec"), nb::arg("is_key"), nb::arg("rotated"), nb::arg("plane"), nb::arg("x"),
      "Decode plane, uint8 [bytes_per_page], into x, float32 [page_size, n_heads, head_dim], in the plain basis.");
}

}  // namespace octavo
