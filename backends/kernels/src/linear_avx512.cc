#include "simd_avx512.h"

#include "linear_kernel.inl.h"

namespace octavo {
const LinearKernel& linear_avx512() { return kLinearKernel<Avx512>; }
}  // namespace octavo
