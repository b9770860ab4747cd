// The interface between the task split (linear.cc, built for the baseline CPU) and the arithmetic
// (linear_<set>.cc, each built for its own instruction set). Plain data only, see
// paged_attention_kernel.h.
#pragma once

#include <stdint.h>

namespace octavo {

constexpr int kPanel = 16;  // columns of the output whose weights lie side by side

// One call of the op; every size in it has been checked.
struct LinearProblem {
  const float* input;     // [rows, depth]
  const float* weight;    // [ceil(columns / kPanel), depth, kPanel]
  const float* bias;      // [columns] or null
  const float* residual;  // [rows, columns] or null, added to the finished sums
  float* output;          // [rows, columns]
  int64_t rows;
  int64_t columns;
  int64_t depth;
};

// Rows [first_row, last_row) and panels [first_panel, last_panel) of the output.
struct LinearTask {
  int64_t first_row;
  int64_t last_row;
  int64_t first_panel;
  int64_t last_panel;
};

struct LinearKernel {
  int64_t max_tile_rows;  // rows that are computed at once, so that each weight is read once
  // Panels that a tile computes at once where a task has `rows` rows; a multiple of them leaves no
  // register idle.
  int64_t (*panels_at_once)(int64_t rows);
  void (*compute)(const LinearProblem&, const LinearTask&);
};

const LinearKernel& linear_portable();
const LinearKernel& linear_avx2();
const LinearKernel& linear_avx512();
const LinearKernel& linear_lanes16();

}  // namespace octavo
