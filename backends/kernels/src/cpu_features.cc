#include "cpu_features.h"

#include <cstdlib>
#include <cstring>
#include <iterator>

#include "errors.h"

namespace octavo {
namespace {

constexpr const char* kNames[] = {"portable", "avx2", "avx512", "lanes16"};
constexpr const char* kNamesWithDotProducts[] = {"portable", "avx2_vnni", "avx512_vnni", "lanes16"};

#if defined(OCTAVO_KERNELS_LANES16)

// The test build that runs the AVX-512 tile shapes in portable code has no other variant.
constexpr CpuFeatures kPreferred[] = {{InstructionSet::kLanes16, false}};
bool can_run(CpuFeatures) { return true; }

#elif defined(__x86_64__)

constexpr CpuFeatures kPreferred[] = {{InstructionSet::kAvx512, true},
                                      {InstructionSet::kAvx512, false},
                                      {InstructionSet::kAvx2, true},
                                      {InstructionSet::kAvx2, false},
                                      {InstructionSet::kPortable, false}};

// __builtin_cpu_supports also asks (by XGETBV) whether the system saves the registers.
bool can_run(CpuFeatures features) {
  switch (features.set) {
    case InstructionSet::kAvx512:
      return (!features.integer_dot_products || __builtin_cpu_supports("avx512vnni")) &&
             __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case InstructionSet::kAvx2:
      return (!features.integer_dot_products || __builtin_cpu_supports("avxvnni")) &&
             __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
             __builtin_cpu_supports("f16c");
    default:
      return true;
  }
}

#else

constexpr CpuFeatures kPreferred[] = {{InstructionSet::kPortable, false}};
bool can_run(CpuFeatures) { return true; }

#endif

CpuFeatures named(const char* name) {
  for (const CpuFeatures features : kPreferred) {
    if (std::strcmp(name, name_of(features)) != 0) continue;
    if (can_run(features)) return features;
    refuse("OCTAVO_CPU_ISA is %s and this CPU or its operating system does not have it; unset "
           "the variable to use the best set there is",
           name);
  }
  refuse("OCTAVO_CPU_ISA is %.32s and this build knows portable, avx2, avx2_vnni, avx512 and "
         "avx512_vnni (all but the first on x86-64 only); unset the variable to use the best set "
         "there is",
         name);
}

}  // namespace

const char* name_of(CpuFeatures features) {
  const int index = static_cast<int>(features.set);
  return features.integer_dot_products ? kNamesWithDotProducts[index] : kNames[index];
}

CpuFeatures selected_features() {
  const char* name = std::getenv("OCTAVO_CPU_ISA");
  if (name != nullptr && *name != '\0') return named(name);
  for (const CpuFeatures features : kPreferred)
    if (can_run(features)) return features;
  return {InstructionSet::kPortable, false};
}

InstructionSet selected_instruction_set() { return selected_features().set; }

}  // namespace octavo
