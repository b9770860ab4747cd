#include "simd_avx2.h"

#include "linear_kernel.inl.h"

namespace octavo {
LinearKernel linear_avx2() { return compute_linear<Avx2>; }
}  // namespace octavo
