#include "simd_baseline.h"

#include "linear_kernel.inl.h"

namespace octavo {
const LinearKernel& linear_portable() { return kLinearKernel<Baseline>; }
}  // namespace octavo
