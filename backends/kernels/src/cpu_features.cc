#include "cpu_features.h"

#include <cstdlib>
#include <cstring>
#include <iterator>

#include "errors.h"

namespace octavo {
namespace {

constexpr const char* kNames[] = {"portable", "avx2", "avx512", "lanes16"};

#if defined(OCTAVO_KERNELS_LANES16)

// The test build that runs the AVX-512 tile shapes in portable code has no other variant.
constexpr InstructionSet kPreferred[] = {InstructionSet::kLanes16};
bool can_run(InstructionSet) { return true; }

#elif defined(__x86_64__)

constexpr InstructionSet kPreferred[] = {InstructionSet::kAvx512, InstructionSet::kAvx2,
                                         InstructionSet::kPortable};

// __builtin_cpu_supports also asks (by XGETBV) whether the system saves the registers.
bool can_run(InstructionSet set) {
  switch (set) {
    case InstructionSet::kAvx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case InstructionSet::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    default:
      return true;
  }
}

#else

constexpr InstructionSet kPreferred[] = {InstructionSet::kPortable};
bool can_run(InstructionSet) { return true; }

#endif

InstructionSet named(const char* name) {
  for (const InstructionSet set : kPreferred) {
    if (std::strcmp(name, name_of(set)) != 0) continue;
    if (can_run(set)) return set;
    refuse("OCTAVO_CPU_ISA is %s and this CPU or its operating system does not have it; unset "
           "the variable to use the best set there is",
           name);
  }
  refuse("OCTAVO_CPU_ISA is %.32s and this build knows portable, avx2 and avx512 (the last two on "
         "x86-64 only); unset the variable to use the best set there is",
         name);
}

}  // namespace

const char* name_of(InstructionSet set) { return kNames[static_cast<int>(set)]; }

InstructionSet selected_instruction_set() {
  const char* name = std::getenv("OCTAVO_CPU_ISA");
  if (name != nullptr && *name != '\0') return named(name);
  for (const InstructionSet set : kPreferred)
    if (can_run(set)) return set;
  return InstructionSet::kPortable;
}

}  // namespace octavo
