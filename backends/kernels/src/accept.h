// octavo::Accept for ONNX Runtime on CPU: rejection sampling of drafts. Operands: see README.md and
// graphs/ops/accept.py.
#pragma once

#include <cstdint>

#include "custom_op.h"
#include "sampling_kernel.h"

namespace octavo {

class Accept {
 public:
  static constexpr const char* kName = "Accept";
  static constexpr ort::ElementType kInputTypes[] = {
      ort::ElementType::kFloat,   // logits [L, V]
      ort::ElementType::kInt32,   // edit_rows [E]
      ort::ElementType::kInt32,   // edit_token_ids [E]
      ort::ElementType::kFloat,   // edit_values [E]
      ort::ElementType::kInt32,   // first_rows [L]
      ort::ElementType::kInt32,   // draft_token_ids [L]
      ort::ElementType::kFloat,   // draft_probs [P, V]
      ort::ElementType::kInt32,   // prob_rows [L]
      ort::ElementType::kDouble,  // temperature [L]
      ort::ElementType::kInt32,   // top_k [L]
      ort::ElementType::kDouble,  // top_p [L]
      ort::ElementType::kDouble,  // min_p [L]
      ort::ElementType::kDouble,  // uniforms [L, 2]
  };
  static constexpr ort::ElementType kOutputTypes[] = {ort::ElementType::kInt32};  // token_ids [L]

  explicit Accept(const Attributes& attributes);
  void compute(const Context& context) const;

 private:
  int64_t vocab_;
  const SamplingKernel& kernel_;
};

}  // namespace octavo
