#include "simd_avx512.h"

#include "sampling_kernel.inl.h"

namespace octavo {
const SamplingKernel& sampling_avx512() { return kSampling<Avx512>; }
}  // namespace octavo
