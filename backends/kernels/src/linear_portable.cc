#include "simd_baseline.h"

#include "linear_kernel.inl.h"

namespace octavo {
LinearKernel linear_portable() { return compute_linear<Baseline>; }
}  // namespace octavo
