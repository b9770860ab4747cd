#include "simd_avx512.h"

#include "linear_kernel.inl.h"

namespace octavo {
LinearKernel linear_avx512() { return compute_linear<Avx512>; }
}  // namespace octavo
