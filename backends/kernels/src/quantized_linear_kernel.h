// The interface between the task split (quantized_linear.cc, built for the baseline CPU) and the
// arithmetic (quantized_linear_<set>.cc, each built for its own instruction set). Plain data only,
// see paged_attention_kernel.h.
#pragma once

#include <stdint.h>

namespace octavo {

constexpr int kWeightPanel = 32;  // columns of the output whose weights lie side by side
constexpr int kDotDepth = 4;      // values along the depth that lie side by side
// Values along the depth that share a scale: activations always, weights where scales are grouped.
constexpr int kGroup = 32;

// Rows whose sums rest in the scratch memory while the weights of a panel go by.
constexpr int kRowBlock = 192;

// One call of the op; every size in it has been checked. Depths are multiples of kGroup.
struct QuantizedLinearProblem {
  const int8_t* quantized;         // [rows, depth]
  const float* scales;             // [rows, depth / kGroup]
  const int32_t* sums;             // the same: of quantized
  int32_t* starts;                 // the same: -zero_point * sum, where integer sums start
  float* scaled_sums;              // the same: scale * sum, or null without minimums
  const uint8_t* weight;           // [panels, depth / 4, 32, 4], or [panels, depth / 8, 32, 4]
  const float* column_scales;      // [columns], or null where scales are grouped
  const uint16_t* group_scales;    // halves [panels, depth / kGroup, 32], or null
  const uint16_t* group_minimums;  // the same, or null for none
  const float* bias;               // [columns] or null
  const float* residual;           // [rows, columns] or null
  float* output;                   // [rows, columns]
  int64_t rows;
  int64_t columns;
  int64_t depth;
  int bits;  // 4 or 8
  int zero_point;
};

// At most kRowBlock rows [first_row, last_row) and panels [first_panel, last_panel) of the output.
struct QuantizedLinearTask {
  int64_t first_row;
  int64_t last_row;
  int64_t first_panel;
  int64_t last_panel;
};

struct QuantizedLinearKernel {
  // Fills `starts` and `scaled_sums`, once for all tasks.
  void (*prepare)(const QuantizedLinearProblem&);
  // Computes a task; `resting` is kRowBlock * kWeightPanel floats that it may scribble on.
  void (*compute)(const QuantizedLinearProblem&, const QuantizedLinearTask&, float* resting);
};

const QuantizedLinearKernel& quantized_linear_portable();
const QuantizedLinearKernel& quantized_linear_avx2();
const QuantizedLinearKernel& quantized_linear_avx2_vnni();
const QuantizedLinearKernel& quantized_linear_avx512();
const QuantizedLinearKernel& quantized_linear_avx512_vnni();
const QuantizedLinearKernel& quantized_linear_lanes16();

}  // namespace octavo
