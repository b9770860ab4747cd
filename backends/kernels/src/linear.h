// octavo::Linear: input times packed weights plus bias and residual, in
// float32. Inputs, outputs, attributes: see README.md.
#pragma once

#include <cstdint>

#include "kernel_host.h"
#include "linear_kernel.h"

namespace octavo {

class Linear {
 public:
  static constexpr const char* kName = "Linear";
  static constexpr ElementType kInputTypes[] = {
      ElementType::kFloat, ElementType::kFloat, ElementType::kFloat,
      ElementType::kFloat};
  static constexpr ElementType kOutputTypes[] = {ElementType::kFloat};

  explicit Linear(const Attributes& attributes);
  void compute(const Context& context) const;

 private:
  int64_t columns_;
  const LinearKernel& kernel_;
};

}  // namespace octavo
