// octavo::QuantizedLinear for ONNX Runtime on CPU: quantised activations times packed 8- or 4-bit
// weights. Inputs, outputs, attributes: see README.md.
#pragma once

#include <cstdint>

#include "custom_op.h"
#include "quantized_linear_kernel.h"

namespace octavo {

class QuantizedLinear {
 public:
  static constexpr const char* kName = "QuantizedLinear";
  static constexpr ort::ElementType kInputTypes[] = {
      ort::ElementType::kInt8,  ort::ElementType::kFloat,   ort::ElementType::kInt32,
      ort::ElementType::kUint8, ort::ElementType::kFloat,   ort::ElementType::kFloat16,
      ort::ElementType::kFloat16, ort::ElementType::kFloat, ort::ElementType::kFloat};
  static constexpr ort::ElementType kOutputTypes[] = {ort::ElementType::kFloat};

  explicit QuantizedLinear(const Attributes& attributes);
  void compute(const Context& context) const;

 private:
  int64_t columns_;
  int bits_;
  int zero_point_;
  const QuantizedLinearKernel& kernel_;
};

}  // namespace octavo
