// What each kernel source gives to its instruction set's table.
#pragma once

#include "dispatch.hpp"

namespace octavo::OCTAVO_ISA {

MathKernels math_kernels();
CodecKernels codec_kernels();
AttentionKernels attention_kernels();

const KernelTable& kernel_table();

}  // namespace octavo::OCTAVO_ISA
