// The table of one instruction set.
#include "dispatch_table.hpp"

#define OCTAVO_TEXT_(x) #x
#define OCTAVO_TEXT(x) OCTAVO_TEXT_(x)

namespace octavo::OCTAVO_ISA {

const KernelTable& kernel_table() {
  static const KernelTable table = {
      .isa = OCTAVO_TEXT(OCTAVO_ISA),
      .math = math_kernels(),
      .codecs = codec_kernels(),
      .attention = attention_kernels(),
      .linear = linear_kernels(),
      .peaks = peak_kernels(),
      .sampling = sampling_kernels(),
  };
  return table;
}

}  // namespace octavo::OCTAVO_ISA
