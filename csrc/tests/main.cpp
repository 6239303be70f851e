// Runs every test, or those whose name contains the first argument. Exit status 1 when any fails.
#include <cstring>

#include "dispatch.hpp"
#include "test.hpp"

namespace octavo::test {

std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

std::vector<const char*> isas() {
  std::vector<const char*> found;
  for (const char* isa : {"portable", "avx2", "avx512"})
    if (have_kernels(isa)) found.push_back(isa);
  return found;
}

}  // namespace octavo::test

int main(int argc, char** argv) {
  int failed = 0, run = 0;
  for (const auto& c : octavo::test::cases()) {
    if (argc > 1 && std::strstr(c.name, argv[1]) == nullptr) continue;
    ++run;
    try {
      c.body();
      std::printf("ok   %s\n", c.name);
    } catch (const std::exception& e) {
      ++failed;
      std::printf("FAIL %s: %s\n", c.name, e.what());
    }
    std::fflush(stdout);
  }
  std::printf("%d run, %d failed\n", run, failed);
  return failed == 0 && run > 0 ? 0 : 1;
}
