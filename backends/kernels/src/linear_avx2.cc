#include "simd_avx2.h"

#include "linear_kernel.inl.h"

namespace octavo {
const LinearKernel& linear_avx2() { return kLinearKernel<Avx2>; }
}  // namespace octavo
