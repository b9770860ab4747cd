// The row-wise ops for ONNX Runtime on CPU: octavo::Quantize, Norm, NormQuantize, Activate and
// ActivateQuantize. Inputs, outputs, attributes: see README.md.
#pragma once

#include <cstdint>

#include "custom_op.h"
#include "rowwise_kernel.h"

namespace octavo {

class Quantize {
 public:
  static constexpr const char* kName = "Quantize";
  static constexpr ort::ElementType kInputTypes[] = {ort::ElementType::kFloat};
  static constexpr ort::ElementType kOutputTypes[] = {
      ort::ElementType::kInt8, ort::ElementType::kFloat, ort::ElementType::kInt32};

  explicit Quantize(const Attributes& attributes);
  void compute(const Context& context) const;

 private:
  const RowwiseKernel& kernel_;
};

class NormBase {
 public:
  static constexpr ort::ElementType kInputTypes[] = {
      ort::ElementType::kFloat, ort::ElementType::kFloat, ort::ElementType::kFloat,
      ort::ElementType::kFloat};

  explicit NormBase(const Attributes& attributes);

 protected:
  void compute(const Context& context, bool quantized) const;

 private:
  const RowwiseKernel& kernel_;
  float epsilon_;
  bool centered_;
};

class Norm : public NormBase {
 public:
  static constexpr const char* kName = "Norm";
  static constexpr ort::ElementType kOutputTypes[] = {ort::ElementType::kFloat,
                                                      ort::ElementType::kFloat};
  using NormBase::NormBase;
  void compute(const Context& context) const { NormBase::compute(context, false); }
};

class NormQuantize : public NormBase {
 public:
  static constexpr const char* kName = "NormQuantize";
  static constexpr ort::ElementType kOutputTypes[] = {
      ort::ElementType::kInt8, ort::ElementType::kFloat, ort::ElementType::kInt32,
      ort::ElementType::kFloat};
  using NormBase::NormBase;
  void compute(const Context& context) const { NormBase::compute(context, true); }
};

class ActivateBase {
 public:
  static constexpr ort::ElementType kInputTypes[] = {ort::ElementType::kFloat};

  explicit ActivateBase(const Attributes& attributes);

 protected:
  void compute(const Context& context, bool quantized) const;

 private:
  const RowwiseKernel& kernel_;
  ActivationFunction function_;
  bool gated_;
};

class Activate : public ActivateBase {
 public:
  static constexpr const char* kName = "Activate";
  static constexpr ort::ElementType kOutputTypes[] = {ort::ElementType::kFloat};
  using ActivateBase::ActivateBase;
  void compute(const Context& context) const { ActivateBase::compute(context, false); }
};

class ActivateQuantize : public ActivateBase {
 public:
  static constexpr const char* kName = "ActivateQuantize";
  static constexpr ort::ElementType kOutputTypes[] = {
      ort::ElementType::kInt8, ort::ElementType::kFloat, ort::ElementType::kInt32};
  using ActivateBase::ActivateBase;
  void compute(const Context& context) const { ActivateBase::compute(context, true); }
};

}  // namespace octavo
