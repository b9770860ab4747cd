#include "integer_dot_avx2.h"

#include "quantized_linear_kernel.inl.h"

namespace octavo {
QuantizedLinearKernel quantized_linear_avx2_vnni() { return compute_quantized_linear<Avx2Vnni>; }
}  // namespace octavo
