// Test only: portable code in the tile shapes of AVX-512, for CPUs that do not have it.
#include "integer_dot_portable.h"

#include "quantized_linear_kernel.inl.h"

namespace octavo {
QuantizedLinearKernel quantized_linear_lanes16() {
  return compute_quantized_linear<PortableIntegers<16, 3, 4>>;
}
}  // namespace octavo
