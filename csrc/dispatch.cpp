#include "dispatch.hpp"

#include <stdexcept>
#include <string>
#include <string_view>

namespace octavo {

namespace portable {
const KernelTable& kernel_table();
}
namespace avx2 {
const KernelTable& kernel_table();
}
namespace avx512 {
const KernelTable& kernel_table();
}

namespace {

struct Path {
  const char* isa;
  const char* needs;
  bool built;
  bool (*runs_here)();
  const KernelTable* (*table)();
};

// Best first. __builtin_cpu_supports also asks whether the operating system saves the registers.
const Path kPaths[] = {
#if defined(OCTAVO_HAVE_avx512)
    {"avx512", "AVX-512 F, BW, DQ, VL and VNNI", true,
     [] {
       return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
              __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
     },
     [] { return &avx512::kernel_table(); }},
#else
    {"avx512", "", false, [] { return false; }, [] { return static_cast<const KernelTable*>(nullptr); }},
#endif
#if defined(OCTAVO_HAVE_avx2)
    // Every processor with AVX2 has F16C.
    {"avx2", "AVX2 and FMA", true, [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); },
     [] { return &avx2::kernel_table(); }},
#else
    {"avx2", "", false, [] { return false; }, [] { return static_cast<const KernelTable*>(nullptr); }},
#endif
    {"portable", "", true, [] { return true; }, [] { return &portable::kernel_table(); }},
};

}  // namespace

const KernelTable& select_kernels(const char* isa) {
  const std::string_view name(isa);
  for (const Path& path : kPaths) {
    if (name == "auto" && path.built && path.runs_here()) return *path.table();
    if (name != path.isa) continue;
    if (!path.built) throw std::invalid_argument("isa \"" + std::string(name) + "\" is not in this build of octavo");
    if (!path.runs_here())
      throw std::invalid_argument("isa \"" + std::string(name) + "\" needs " + path.needs +
                                  ", which this machine lacks; use \"auto\"");
    return *path.table();
  }
  throw std::invalid_argument("isa must be auto, portable, avx2 or avx512, got \"" + std::string(name) + "\"");
}

bool have_kernels(const char* isa) {
  for (const Path& path : kPaths)
    if (std::string_view(isa) == path.isa) return path.built && path.runs_here();
  return false;
}

}  // namespace octavo
