// Stored matrices as Python hands them over.
#pragma once

#include <nanobind/stl/optional.h>

#include <optional>
#include <span>

#include "bindings.hpp"
#include "linear.hpp"

namespace octavo {

/// A stored matrix and the arrays that hold it.
struct Stored {
  TensorView view;
  Array data;
  std::optional<Array> row_order;
};

inline std::span<const float> vector_in(const Array& a, const char* name) {
  const float* p = in<float>(a, name, {-1});
  return {p, a.shape(0)};
}

}  // namespace octavo
