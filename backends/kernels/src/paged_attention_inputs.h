// Reading and checking what a call of octavo::PagedAttention was given.
#pragma once

#include "custom_op.h"
#include "paged_attention.h"
#include "paged_attention_kernel.h"

namespace octavo {

PagedAttentionAttributes read_attributes(const Attributes& attributes);

struct PagedAttentionInputs {
  AttentionProblem problem;  // its cache is the input's; its output is not set
  Tensor cache;
};

// Throws InvalidArgument unless every index that the kernel will follow lies within its tensor.
// Nothing has been written when it throws.
PagedAttentionInputs read_inputs(const Context& context,
                                 const PagedAttentionAttributes& attributes);

}  // namespace octavo
