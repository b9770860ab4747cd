#include "simd_portable.h"

#include "paged_attention_kernel.inl.h"

namespace octavo {
#if defined(__aarch64__)
using Baseline = Portable<4, 6, 24>;  // 32 registers of 4 floats
#else
using Baseline = Portable<4, 3, 12>;  // 16 registers of 4 floats
#endif
const AttentionKernel& paged_attention_portable() { return kKernel<Baseline>; }
}  // namespace octavo
