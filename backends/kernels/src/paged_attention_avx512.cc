#include "simd_avx512.h"

#include "paged_attention_kernel.inl.h"

namespace octavo {
const AttentionKernel& paged_attention_avx512() { return kKernel<Avx512>; }
}  // namespace octavo
