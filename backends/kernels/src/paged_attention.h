// octavo::PagedAttention for ONNX Runtime on CPU: writes a step's keys and values into the paged
// cache, then attends. Inputs, outputs, attributes: see README.md.
#pragma once

#include "custom_op.h"
#include "paged_attention_checks.h"
#include "paged_attention_kernel.h"

namespace octavo {

class PagedAttention {
 public:
  static constexpr const char* kName = "PagedAttention";
  static constexpr ort::ElementType kInputTypes[] = {
      ort::ElementType::kFloat, ort::ElementType::kFloat, ort::ElementType::kFloat,
      ort::ElementType::kFloat, ort::ElementType::kInt32, ort::ElementType::kInt32,
      ort::ElementType::kInt32, ort::ElementType::kInt32, ort::ElementType::kFloat,
      ort::ElementType::kFloat};
  static constexpr ort::ElementType kOutputTypes[] = {ort::ElementType::kFloat,
                                                      ort::ElementType::kFloat};
  static constexpr int kInPlaceInputs[] = {3};
  static constexpr int kInPlaceOutputs[] = {1};

  explicit PagedAttention(const Attributes& attributes);
  void compute(const Context& context) const;

 private:
  PagedAttentionAttributes attributes_;
  const AttentionKernel& kernel_;
};

}  // namespace octavo
