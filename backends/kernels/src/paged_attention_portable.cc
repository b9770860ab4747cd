#include "simd_baseline.h"

#include "paged_attention_kernel.inl.h"

namespace octavo {
const AttentionKernel& paged_attention_portable() { return kKernel<Baseline>; }
}  // namespace octavo
