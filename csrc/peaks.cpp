// What the units of a core can do at most, in one instruction set: loops of independent multiply-adds on registers.
#include "dispatch_table.hpp"
#include "simd.hpp"

namespace octavo::OCTAVO_ISA {
namespace {

#if OCTAVO_AVX2

/// Enough chains to cover the latency of two multiply-adds per cycle, few enough for 16 registers.
constexpr int kChains = 10;

/// Calls step(sum, i) for every chain, n times; the sums end in a place that the compiler must believe in.
template <class Sum, class F>
OCTAVO_INLINE void chains(size_t n, F&& step) {
  Sum sum[kChains];
  unroll<kChains>([&](auto i) OCTAVO_BODY { sum[i] = Sum{}; });
  for (size_t k = 0; k < n; ++k)
    unroll<kChains>([&](auto i) OCTAVO_BODY {
      step(sum[i]);
      pin(sum[i]);
    });
  volatile auto last = sum[0][0];
  unroll<kChains>([&](auto i) OCTAVO_BODY { last = sum[i][0]; });
}

size_t f32(size_t n) {
  f32x8 a = set1(0.5f), b = set1(0.25f);
  chains<f32x8>(n, [&](f32x8& sum) OCTAVO_BODY { sum = fma(a, b, sum); });
  return n * kChains * 8;
}

size_t i16(size_t n) {
  i16x16 a = bits<i16x16>(set1i(0x00030002)), b = bits<i16x16>(set1i(0x00010004));
  chains<i32x8>(n, [&](i32x8& sum) OCTAVO_BODY {
    pin(a);  // or the product is taken out of the loop
    sum = add_products(sum, a, b);
  });
  return n * kChains * 16;
}

size_t i8(size_t n) {
  u8x32 a = set1u8(3);
  i8x32 b = bits<i8x32>(set1u8(2));
  chains<i32x8>(n, [&](i32x8& sum) OCTAVO_BODY {
    pin(a);
    sum = dot_quads(sum, a, b);
  });
  return n * kChains * 32;
}

#endif

}  // namespace

PeakKernels peak_kernels() {
#if OCTAVO_AVX2
  return {.f32 = f32, .i16 = i16, .i8 = i8};
#else
  return {};  // `pin` does nothing here, and compilers then do without the loops
#endif
}

}  // namespace octavo::OCTAVO_ISA
