#include "integer_dot_portable.h"

#include "quantized_linear_kernel.inl.h"

namespace octavo {
const QuantizedLinearKernel& quantized_linear_portable() {
  return kQuantizedLinear<PortableIntegers<4, 2, 4>>;
}
}  // namespace octavo
