// octavo::Linear for ONNX Runtime on CPU: input times packed weights plus bias and residual, in
// float32. Inputs, outputs, attributes: see README.md.
#pragma once

#include <cstdint>

#include "custom_op.h"
#include "linear_kernel.h"

namespace octavo {

class Linear {
 public:
  static constexpr const char* kName = "Linear";
  static constexpr ort::ElementType kInputTypes[] = {
      ort::ElementType::kFloat, ort::ElementType::kFloat, ort::ElementType::kFloat,
      ort::ElementType::kFloat};
  static constexpr ort::ElementType kOutputTypes[] = {ort::ElementType::kFloat};

  explicit Linear(const Attributes& attributes);
  void compute(const Context& context) const;

 private:
  int64_t columns_;
  const LinearKernel& kernel_;
};

}  // namespace octavo
