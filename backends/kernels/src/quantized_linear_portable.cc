#include "integer_dot_portable.h"

#include "quantized_linear_kernel.inl.h"

namespace octavo {
QuantizedLinearKernel quantized_linear_portable() {
  return compute_quantized_linear<PortableIntegers<4, 2, 4>>;
}
}  // namespace octavo
