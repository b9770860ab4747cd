#include "simd_avx2.h"

#include "sampling_kernel.inl.h"

namespace octavo {
const SamplingKernel& sampling_avx2() { return kSampling<Avx2>; }
}  // namespace octavo
