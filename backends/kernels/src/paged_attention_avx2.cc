#include "simd_avx2.h"

#include "paged_attention_kernel.inl.h"

namespace octavo {
const AttentionKernel& paged_attention_avx2() { return kKernel<Avx2>; }
}  // namespace octavo
