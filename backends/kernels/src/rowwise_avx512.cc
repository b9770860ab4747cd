#include "int8_avx512.h"

#include "rowwise_kernel.inl.h"

namespace octavo {
const RowwiseKernel& rowwise_avx512() { return kRowwise<Avx512>; }
}  // namespace octavo
