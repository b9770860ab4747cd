// Test only: portable code in the tile shapes of AVX-512, for CPUs that do not have it.
#include "integer_dot_portable.h"

#include "quantized_linear_kernel.inl.h"

namespace octavo {
const QuantizedLinearKernel& quantized_linear_lanes16() {
  return kQuantizedLinear<PortableIntegers<16, 6, 2>>;
}
}  // namespace octavo
