// octavo::PagedAttention: writes a step's keys and values into the paged
// cache, then attends. Inputs, outputs, attributes: see README.md.
#pragma once

#include "kernel_host.h"
#include "paged_attention_checks.h"
#include "paged_attention_kernel.h"

namespace octavo {

class PagedAttention {
 public:
  static constexpr const char* kName = "PagedAttention";
  static constexpr ElementType kInputTypes[] = {
      ElementType::kFloat, ElementType::kFloat, ElementType::kFloat,
      ElementType::kFloat, ElementType::kInt32, ElementType::kInt32,
      ElementType::kInt32, ElementType::kInt32, ElementType::kFloat,
      ElementType::kFloat};
  static constexpr ElementType kOutputTypes[] = {ElementType::kFloat,
                                                      ElementType::kFloat};
  static constexpr int kInPlaceInputs[] = {3};
  static constexpr int kInPlaceOutputs[] = {1};

  explicit PagedAttention(const Attributes& attributes);
  void compute(const Context& context) const;

 private:
  PagedAttentionAttributes attributes_;
  const AttentionKernel& kernel_;
};

}  // namespace octavo
