#include "integer_dot_avx512.h"

#include "quantized_linear_kernel.inl.h"

namespace octavo {
QuantizedLinearKernel quantized_linear_avx512() { return compute_quantized_linear<Avx512Pairs>; }
}  // namespace octavo
