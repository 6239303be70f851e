// The kernels of one instruction set as a table of function pointers, and the choice of a table at run time.
//
// To add kernels: a struct of function pointers here (or in a header included here), a member of KernelTable, and a
// function `X_kernels()` in namespace octavo::OCTAVO_ISA, declared in dispatch_table.hpp and called in
// dispatch_table.cpp. This header and those it includes are read by kernel sources too: plain data only, no code.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "attention_types.hpp"
#include "codecs.hpp"
#include "linear_types.hpp"
#include "sampling_types.hpp"

namespace octavo {

/// Part of the numeric fingerprint: raise it whenever any kernel's results may change in any bit.
inline constexpr int kKernelRevision = 4;

struct MathKernels {
  void (*exp)(const float* x, size_t n, float* out);
  void (*exp2_down)(const float* x, size_t n, float* out);
  void (*silu)(const float* x, size_t n, float* out);
  void (*rms_norm)(const float* x, const float* weight, float eps, size_t n, float* out);
  void (*rope)(const float* x, const float* cosine, const float* sine, size_t half, float* out);
  /// Logarithm of the softmax of n values. Max and sum run in a fixed order of lanes.
  void (*log_softmax)(const float* x, size_t n, float* out);
};

/// Loops on registers alone: n rounds of them, returning the multiply-adds done. Null in the portable path.
struct PeakKernels {
  size_t (*f32)(size_t n);
  size_t (*i16)(size_t n);  ///< 16-bit factors, 32-bit sums
  size_t (*i8)(size_t n);   ///< 8-bit factors, 32-bit sums
};

struct KernelTable {
  const char* isa;
  MathKernels math;
  CodecKernels codecs;
  AttentionKernels attention;
  LinearKernels linear;
  PeakKernels peaks;
  SamplingKernels sampling;
};

/// The table for "portable", "avx2" or "avx512", or the best for "auto". Throws std::invalid_argument when the name is
/// unknown, this build lacks the path, or this machine lacks the instructions.
const KernelTable& select_kernels(const char* isa);

/// Whether `select_kernels(isa)` would succeed.
bool have_kernels(const char* isa);

}  // namespace octavo
