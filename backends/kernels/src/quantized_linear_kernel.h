// The interface between the task split (quantized_linear.cc, built for the baseline CPU) and the
// arithmetic (quantized_linear_<set>.cc, each built for its own instruction set). Plain data only,
// see paged_attention_kernel.h.
#pragma once

#include <stdint.h>

namespace octavo {

constexpr int kWeightPanel = 32;      // columns of the output whose weights lie side by side
constexpr int kDotDepth = 4;          // values along the depth that lie side by side
constexpr int kActivationGroup = 64;  // activations that share a scale
constexpr int kWeightGroup = 32;      // weights that share a scale, where scales are grouped

// Rows whose sums rest in the scratch memory while the weights of a tile's columns go by.
constexpr int kRowBlock = 192;
// A block of a tile's weights, 16 KiB as bytes, stays in the first-level cache while the rows go by.
constexpr int kDepthBlock = 256;
constexpr int kWidestTile = 2 * kWeightPanel;

// One call of the op; every size in it has been checked. Depths are multiples of kActivationGroup.
struct QuantizedLinearProblem {
  const int8_t* quantized;         // [rows, depth]
  const float* scales;             // [rows, depth / kActivationGroup]
  const int32_t* starts;           // [rows, depth / group]: -zero_point * sum, where a group's
                                   // integer sum starts; group is the weights' or activations'
  const float* sums;               // [rows, depth / kWeightGroup], null without minimums
  const uint8_t* weight;           // [panels, depth / 4, 32, 4], or [panels, depth / 8, 32, 4]
  const float* column_scales;      // [columns], or null where scales are grouped
  const uint16_t* group_scales;    // halves [panels, depth / kWeightGroup, 32], or null
  const uint16_t* group_minimums;  // the same, or null for none
  const float* bias;               // [columns] or null
  const float* residual;           // [rows, columns] or null
  float* output;                   // [rows, columns]
  int64_t rows;
  int64_t columns;
  int64_t depth;
  int bits;  // 4 or 8
};

// At most kRowBlock rows [first_row, last_row) and panels [first_panel, last_panel) of the output.
struct QuantizedLinearTask {
  int64_t first_row;
  int64_t last_row;
  int64_t first_panel;
  int64_t last_panel;
};

// What a task may scribble on: 64-byte aligned.
struct QuantizedLinearScratch {
  float chains[kRowBlock * kWidestTile];
  float scales[kDepthBlock / kWeightGroup * kWidestTile];
  float minimums[kDepthBlock / kWeightGroup * kWidestTile];
  uint8_t weights[kDepthBlock * kWidestTile];
};

using QuantizedLinearKernel = void (*)(const QuantizedLinearProblem&, const QuantizedLinearTask&,
                                       QuantizedLinearScratch&);

QuantizedLinearKernel quantized_linear_portable();
QuantizedLinearKernel quantized_linear_avx2();
QuantizedLinearKernel quantized_linear_avx2_vnni();
QuantizedLinearKernel quantized_linear_avx512();
QuantizedLinearKernel quantized_linear_avx512_vnni();
QuantizedLinearKernel quantized_linear_lanes16();

}  // namespace octavo
