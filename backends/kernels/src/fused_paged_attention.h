// octavo::FusedPagedAttention and octavo::FusedPagedAttentionInt8: QK norm
// and rotary embedding of a packed projection, then paged attention, with a cache of float32 or of
// integers and scales. Inputs, outputs, attributes: see README.md.
#pragma once

#include <cstdint>

#include "kernel_host.h"
#include "paged_attention_checks.h"
#include "paged_attention_kernel.h"

namespace octavo {

struct FusedPagedAttentionAttributes {
  PagedAttentionAttributes attention;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_size;
  bool interleaved;
  float norm_epsilon;
};

class FusedPagedAttention {
 public:
  static constexpr const char* kName = "FusedPagedAttention";
  static constexpr ElementType kInputTypes[] = {
      ElementType::kFloat, ElementType::kFloat, ElementType::kFloat,
      ElementType::kFloat, ElementType::kFloat, ElementType::kFloat,
      ElementType::kInt32, ElementType::kInt32, ElementType::kInt32,
      ElementType::kInt32, ElementType::kFloat, ElementType::kFloat};
  static constexpr ElementType kOutputTypes[] = {ElementType::kFloat,
                                                      ElementType::kFloat};
  static constexpr int kInPlaceInputs[] = {5};
  static constexpr int kInPlaceOutputs[] = {1};

  explicit FusedPagedAttention(const Attributes& attributes);
  void compute(const Context& context) const;

 private:
  FusedPagedAttentionAttributes attributes_;
  const AttentionKernel& kernel_;
};

class FusedPagedAttentionInt8 {
 public:
  static constexpr const char* kName = "FusedPagedAttentionInt8";
  static constexpr ElementType kInputTypes[] = {
      ElementType::kFloat, ElementType::kFloat, ElementType::kFloat,
      ElementType::kFloat, ElementType::kFloat, ElementType::kInt8,
      ElementType::kFloat, ElementType::kInt32, ElementType::kInt32,
      ElementType::kInt32, ElementType::kInt32, ElementType::kFloat,
      ElementType::kFloat};
  static constexpr ElementType kOutputTypes[] = {
      ElementType::kFloat, ElementType::kInt8, ElementType::kFloat};
  static constexpr int kInPlaceInputs[] = {5, 6};
  static constexpr int kInPlaceOutputs[] = {1, 2};

  explicit FusedPagedAttentionInt8(const Attributes& attributes);
  void compute(const Context& context) const;

 private:
  FusedPagedAttentionAttributes attributes_;
  const AttentionKernel& kernel_;
};

}  // namespace octavo
