// Test only: portable code in the lanes of AVX-512, for CPUs that do not have it.
#include "simd_portable.h"
#include "simd_tiles.h"

#include "sampling_kernel.inl.h"

namespace octavo {
const SamplingKernel& sampling_lanes16() {
  return kSampling<Portable<16, kRowsOf32Registers, kAccumulatorsOf32Registers>>;
}
}  // namespace octavo
