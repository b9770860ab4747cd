#include "int8_portable.h"
#include "simd_baseline.h"

#include "rowwise_kernel.inl.h"

namespace octavo {
const RowwiseKernel& rowwise_portable() { return kRowwise<Baseline>; }
}  // namespace octavo
