// octavo::Accept: rejection sampling of drafts. Operands: see README.md and
// graphs/ops/accept.py.
#pragma once

#include <cstdint>

#include "kernel_host.h"
#include "sampling_kernel.h"

namespace octavo {

class Accept {
 public:
  static constexpr const char* kName = "Accept";
  static constexpr ElementType kInputTypes[] = {
      ElementType::kFloat,   // logits [L, V]
      ElementType::kInt32,   // edit_rows [E]
      ElementType::kInt32,   // edit_token_ids [E]
      ElementType::kFloat,   // edit_values [E]
      ElementType::kInt32,   // first_rows [L]
      ElementType::kInt32,   // draft_token_ids [L]
      ElementType::kFloat,   // draft_probs [P, V]
      ElementType::kInt32,   // prob_rows [L]
      ElementType::kDouble,  // temperature [L]
      ElementType::kInt32,   // top_k [L]
      ElementType::kDouble,  // top_p [L]
      ElementType::kDouble,  // min_p [L]
      ElementType::kDouble,  // uniforms [L, 2]
  };
  static constexpr ElementType kOutputTypes[] = {ElementType::kInt32};  // token_ids [L]

  explicit Accept(const Attributes& attributes);
  void compute(const Context& context) const;

 private:
  int64_t vocab_;
  const SamplingKernel& kernel_;
};

}  // namespace octavo
