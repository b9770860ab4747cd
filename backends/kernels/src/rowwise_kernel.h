// The interface between the checks and task split of the row-wise ops (rowwise.cc, built for the
// baseline CPU) and their arithmetic (rowwise_<set>.cc, each built for its own instruction set).
// Plain data only, see paged_attention_kernel.h.
#pragma once

#include <stdint.h>

namespace octavo {

constexpr int kQuantizationGroup = 32;  // columns of a row that share a scale and a sum

// Where rows go: floats, or integers where `values` is null.
struct RowOutput {
  float* values;       // [rows, depth]
  int8_t* quantized;   // [rows, padded depth], depth rounded up to kQuantizationGroup
  float* scales;       // [rows, padded depth / kQuantizationGroup]
  int32_t* sums;       // [rows, padded depth / kQuantizationGroup]
};

struct QuantizeProblem {
  const float* input;  // [rows, depth]
  int64_t rows;
  int64_t depth;
  RowOutput output;
};

struct NormProblem {
  const float* input;     // [rows, depth]
  const float* residual;  // [rows, depth] or null
  const float* weight;    // [depth] or null
  const float* bias;      // [depth] or null
  float* sum;             // [rows, depth], input + residual; not written without a residual
  int64_t rows;
  int64_t depth;
  float epsilon;
  bool centered;
  RowOutput output;
};

// The values of the attribute `function`.
enum class ActivationFunction { kSilu, kGelu, kGeluTanh, kRelu, kReluSquared };

struct ActivateProblem {
  const float* input;  // [rows, depth], or [rows, 2 depth] if gated: gates, then factors
  int64_t rows;
  int64_t depth;
  ActivationFunction function;
  bool gated;
  RowOutput output;
};

struct RowRange {
  int64_t first;
  int64_t last;
};

struct RowwiseKernel {
  void (*quantize)(const QuantizeProblem&, RowRange);
  void (*norm)(const NormProblem&, RowRange);
  void (*activate)(const ActivateProblem&, RowRange);
};

const RowwiseKernel& rowwise_portable();
const RowwiseKernel& rowwise_avx2();
const RowwiseKernel& rowwise_avx512();
const RowwiseKernel& rowwise_lanes16();

}  // namespace octavo
