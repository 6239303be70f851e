// Helpers that all binding files share. Arrays are taken as plain ndarrays and checked here, because nanobind's own
// conversion would copy an array of the wrong dtype or order, and an in-place operation would then be lost.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <initializer_list>
#include <stdexcept>
#include <string>

#include "context.hpp"

namespace octavo {

namespace nb = nanobind;

using Array = nb::ndarray<nb::ro, nb::device::cpu>;
using ArrayRw = nb::ndarray<nb::device::cpu>;

template <class T>
constexpr const char* dtype_name() {
  if constexpr (std::is_same_v<T, float>) return "float32";
  if constexpr (std::is_same_v<T, double>) return "float64";
  if constexpr (std::is_same_v<T, int32_t>) return "int32";
  if constexpr (std::is_same_v<T, int64_t>) return "int64";
  if constexpr (std::is_same_v<T, uint8_t>) return "uint8";
  if constexpr (std::is_same_v<T, int8_t>) return "int8";
  if constexpr (std::is_same_v<T, int16_t>) return "int16";
}

[[noreturn]] void throw_array_error(const char* name, const char* dtype, std::initializer_list<int64_t> shape,
                                    const Array& got);

/// The data of a C-contiguous array of T with this shape (-1: any length). Throws std::invalid_argument.
template <class T>
const T* in(const Array& a, const char* name, std::initializer_list<int64_t> shape) {
  bool ok = a.dtype() == nb::dtype<T>() && a.ndim() == shape.size();
  if (ok) {
    int64_t stride = 1;
    for (size_t i = shape.size(); i-- > 0;) {
      const int64_t want = shape.begin()[i], have = static_cast<int64_t>(a.shape(i));
      ok = ok && (want < 0 || want == have) && (have <= 1 || a.stride(i) == stride || a.size() == 0);
      stride *= have;
    }
  }
  if (!ok) throw_array_error(name, dtype_name<T>(), shape, a);
  return static_cast<const T*>(a.data());
}

/// The same, for an array that is written.
template <class T>
T* out(const ArrayRw& a, const char* name, std::initializer_list<int64_t> shape) {
  return const_cast<T*>(in<T>(Array(a), name, shape));
}

/// Runs `f` without the GIL, alone in its context. Exceptions pass through.
template <class F>
auto run_locked(Context& context, F&& f) {
  nb::gil_scoped_release release;
  const std::scoped_lock lock(context.lock);
  return f();
}

// One function per binding file.
void bind_math(nb::module_& m);
void bind_codecs(nb::module_& m);
void bind_attention(nb::module_& m);
void bind_linear(nb::module_& m);
void bind_peaks(nb::module_& m);
void bind_sampling(nb::module_& m);

}  // namespace octavo
