#include "int8_avx2.h"

#include "rowwise_kernel.inl.h"

namespace octavo {
const RowwiseKernel& rowwise_avx2() { return kRowwise<Avx2>; }
}  // namespace octavo
