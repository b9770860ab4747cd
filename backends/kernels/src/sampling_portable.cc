#include "simd_baseline.h"

#include "sampling_kernel.inl.h"

namespace octavo {
const SamplingKernel& sampling_portable() { return kSampling<Baseline>; }
}  // namespace octavo
