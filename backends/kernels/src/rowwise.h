// The row-wise ops: octavo::Quantize, Norm, NormQuantize, Activate and
// ActivateQuantize. Inputs, outputs, attributes: see README.md.
#pragma once

#include <cstdint>

#include "kernel_host.h"
#include "rowwise_kernel.h"

namespace octavo {

class Quantize {
 public:
  static constexpr const char* kName = "Quantize";
  static constexpr ElementType kInputTypes[] = {ElementType::kFloat};
  static constexpr ElementType kOutputTypes[] = {
      ElementType::kInt8, ElementType::kFloat, ElementType::kInt32};

  explicit Quantize(const Attributes& attributes);
  void compute(const Context& context) const;

 private:
  const RowwiseKernel& kernel_;
};

class NormBase {
 public:
  static constexpr ElementType kInputTypes[] = {
      ElementType::kFloat, ElementType::kFloat, ElementType::kFloat,
      ElementType::kFloat};

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
  static constexpr ElementType kOutputTypes[] = {ElementType::kFloat,
                                                      ElementType::kFloat};
  using NormBase::NormBase;
  void compute(const Context& context) const { NormBase::compute(context, false); }
};

class NormQuantize : public NormBase {
 public:
  static constexpr const char* kName = "NormQuantize";
  static constexpr ElementType kOutputTypes[] = {
      ElementType::kInt8, ElementType::kFloat, ElementType::kInt32,
      ElementType::kFloat};
  using NormBase::NormBase;
  void compute(const Context& context) const { NormBase::compute(context, true); }
};

class ActivateBase {
 public:
  static constexpr ElementType kInputTypes[] = {ElementType::kFloat};

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
  static constexpr ElementType kOutputTypes[] = {ElementType::kFloat};
  using ActivateBase::ActivateBase;
  void compute(const Context& context) const { ActivateBase::compute(context, false); }
};

class ActivateQuantize : public ActivateBase {
 public:
  static constexpr const char* kName = "ActivateQuantize";
  static constexpr ElementType kOutputTypes[] = {
      ElementType::kInt8, ElementType::kFloat, ElementType::kInt32};
  using ActivateBase::ActivateBase;
  void compute(const Context& context) const { ActivateBase::compute(context, true); }
};

}  // namespace octavo
