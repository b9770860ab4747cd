// octavo::QuantizedLinear: quantised activations times packed 8- or 4-bit
// weights. Inputs, outputs, attributes: see README.md.
#pragma once

#include <cstdint>

#include "kernel_host.h"
#include "quantized_linear_kernel.h"

namespace octavo {

class QuantizedLinear {
 public:
  static constexpr const char* kName = "QuantizedLinear";
  static constexpr ElementType kInputTypes[] = {
      ElementType::kInt8,  ElementType::kFloat,   ElementType::kInt32,
      ElementType::kUint8, ElementType::kFloat,   ElementType::kFloat16,
      ElementType::kFloat16, ElementType::kFloat, ElementType::kFloat};
  static constexpr ElementType kOutputTypes[] = {ElementType::kFloat};

  explicit QuantizedLinear(const Attributes& attributes);
  void compute(const Context& context) const;

 private:
  int64_t columns_;
  int bits_;
  int zero_point_;
  const QuantizedLinearKernel& kernel_;
};

}  // namespace octavo
