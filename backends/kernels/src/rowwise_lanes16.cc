// Test only: portable code in the tile shapes of AVX-512, for CPUs that do not have it.
#include "int8_portable.h"
#include "simd_tiles.h"

#include "rowwise_kernel.inl.h"

namespace octavo {
const RowwiseKernel& rowwise_lanes16() {
  return kRowwise<Portable<16, kRowsOf32Registers, kAccumulatorsOf32Registers>>;
}
}  // namespace octavo
