// Test only: portable code in the tile shapes of AVX-512, for CPUs that do not have it.
#include "simd_portable.h"
#include "simd_tiles.h"

#include "linear_kernel.inl.h"

namespace octavo {
const LinearKernel& linear_lanes16() {
  return kLinearKernel<Portable<16, kRowsOf32Registers, kAccumulatorsOf32Registers>>;
}
}  // namespace octavo
