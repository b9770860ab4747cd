// What the attention ops check alike before they follow an index.
#pragma once

#include <cstdint>

#include "kernel_host.h"
#include "paged_attention_kernel.h"

namespace octavo {

struct PagedAttentionAttributes {
  float scale;
  float softcap;
  int32_t sliding_window;
  bool causal;
};

PagedAttentionAttributes read_attention_attributes(const Attributes& attributes);

// An input under the name that error messages give it.
struct NamedTensor : Tensor {
  const char* name;
};

// Throws InvalidArgument unless the input has `rank` dimensions that fit 32 bits.
NamedTensor read_input(const Context& context, size_t index, const char* name, size_t rank);

// Throws InvalidArgument unless dimension i has the size; `why` ends the sentence.
void expect(const NamedTensor& tensor, size_t dimension, int64_t size, const char* why);

// Reads what follows an op's queries, keys and values: the cache at input `cache_index`, its
// scales where `scaled`, slots, tables, positions, sinks and slopes. `p` has the token, head and
// size counts already. Throws InvalidArgument unless every index that the kernel will follow lies
// within its tensor; nothing has been written when it throws.
struct CacheInputs {
  NamedTensor cache;
  NamedTensor scales;  // only of a scaled cache
};
CacheInputs read_step(const Context& context, const PagedAttentionAttributes& attributes,
                      size_t cache_index, bool scaled, AttentionProblem& p);

}  // namespace octavo
