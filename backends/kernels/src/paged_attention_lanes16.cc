// Test only: portable code in the tile shapes of AVX-512, for CPUs that do not have it.
#include "simd_portable.h"
#include "simd_tiles.h"

#include "paged_attention_kernel.inl.h"

namespace octavo {
const AttentionKernel& paged_attention_lanes16() {
  return kKernel<Portable<16, kRowsOf32Registers, kAccumulatorsOf32Registers>>;
}
}  // namespace octavo
