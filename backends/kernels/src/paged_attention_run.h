// What the attention ops do alike once their inputs are read.
#pragma once

#include <cstddef>

#include "kernel_host.h"
#include "paged_attention_kernel.h"

namespace octavo {

// The arithmetic for the instruction set that is selected now.
const AttentionKernel& attention_kernel();

// The output that holds an input with this step's changes. Bound to one buffer, as the runtime
// does it, the two need no copy.
void* changed_output(const Context& context, size_t index, const Tensor& input,
                     size_t element_size);

// Writes the step's keys and values into the cache, then attends.
void write_and_attend(const Context& context, const AttentionProblem& problem,
                      const AttentionKernel& kernel);

}  // namespace octavo
