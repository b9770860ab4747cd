#include "integer_dot_avx2.h"

#include "quantized_linear_kernel.inl.h"

namespace octavo {
const QuantizedLinearKernel& quantized_linear_avx2() { return kQuantizedLinear<Avx2Pairs>; }
}  // namespace octavo
