// What each kernel source gives to its instruction set's table.
#pragma once

#include "dispatch.hpp"

namespace octavo::OCTAVO_ISA {

MathKernels math_kernels();
CodecKernels codec_kernels();
AttentionKernels attention_kernels();
LinearKernels linear_kernels();
PeakKernels peak_kernels();
SamplingKernels sampling_kernels();

/// LinearKernels::forward for quantized types.
void linear_quantized(const PackedMatrix& w, const ActRows& x, size_t m0, size_t m1, size_t b0, size_t b1,
                      const LinearOutput& to);

const KernelTable& kernel_table();

}  // namespace octavo::OCTAVO_ISA
