#include "integer_dot_avx512.h"

#include "quantized_linear_kernel.inl.h"

namespace octavo {
const QuantizedLinearKernel& quantized_linear_avx512() { return kQuantizedLinear<Avx512Pairs>; }
}  // namespace octavo
