// Errors that become octavo.errors classes in Python (see bindings.cpp). std::invalid_argument becomes ValueError.
#pragma once

#include <stdexcept>

namespace octavo {

/// octavo.errors.LoadError: weights that cannot be used.
struct LoadError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// octavo.errors.UnsupportedError: a tensor type that no kernel reads.
struct UnsupportedError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// octavo.errors.CodecRangeError: a value that a codec cannot store.
struct CodecRangeError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace octavo
