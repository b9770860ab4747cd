// A linear layer for the instruction set V. Included once by each linear_<set>.cc; everything is in
// an unnamed namespace, see paged_attention_kernel.inl.h.
//
// Exactness. An element of the output is one chain of fused multiply-adds over the depth, from the
// bias on, to which the residual is added. Tiles decide which rows and columns share registers,
// blocks of depth when a chain rests in memory; neither changes it. So a row has the same bits in
// every batch, and on every instruction set that multiplies and adds in one rounding.
#pragma once

#include "kernel_arithmetic.h"
#include "linear_columns.inl.h"
#include "linear_kernel.h"

namespace octavo {
namespace {

// A panel's part of a block, 16 KiB, stays in the first-level cache while the rows go by.
constexpr int64_t kDepthBlock = 256;
// Panels that pass by a tile of rows while it is in the first-level cache.
constexpr int64_t kPanelsAPass = 4;
// Streams of weights that the hardware still prefetches well.
constexpr int kMaxPanelsAtOnce = 4;

template <class V, int R>
constexpr int panels_at_once() {
  constexpr int kPerPanel = kPanel / V::kLanes;
  constexpr int kFit = V::kAccumulators / (R * kPerPanel);
  return kFit < 1 ? 1 : kFit > kMaxPanelsAtOnce ? kMaxPanelsAtOnce : kFit;
}

struct DepthRange {
  int64_t first;
  int64_t last;
};

// Lanes of register j of a group of panels that are columns of the output.
inline int64_t columns_in(const LinearProblem& p, int64_t panel, int64_t offset) {
  return p.columns - panel * kPanel - offset;
}

// Advances the chains of R rows and P panels over a range of the depth.
template <class V, int R, int P>
void advance(const LinearProblem& p, int64_t row, int64_t panel, DepthRange depth) {
  using Vec = typename V::Vec;
  constexpr int kPerPanel = kPanel / V::kLanes;
  constexpr int kRegisters = P * kPerPanel;
  const float* weight[P];
  const float* input[R];
  for (int i = 0; i < P; ++i)
    weight[i] = p.weight + ((panel + i) * p.depth + depth.first) * kPanel;
  for (int r = 0; r < R; ++r) input[r] = p.input + (row + r) * p.depth;
  Vec sums[R][kRegisters];
  OCTAVO_UNROLL
  for (int r = 0; r < R; ++r)
    OCTAVO_UNROLL
    for (int j = 0; j < kRegisters; ++j) {
      const int64_t offset = j * V::kLanes, columns = columns_in(p, panel, offset);
      const float* output = p.output + (row + r) * p.columns + panel * kPanel + offset;
      if (depth.first > 0)
        sums[r][j] = load_columns<V>(output, columns);
      else if (p.bias != nullptr)
        sums[r][j] = load_columns<V>(p.bias + panel * kPanel + offset, columns);
      else
        sums[r][j] = V::set1(0.0f);
    }
  for (int64_t k = depth.first; k < depth.last; ++k) {
    Vec w[kRegisters];
    OCTAVO_UNROLL
    for (int j = 0; j < kRegisters; ++j)
      w[j] = V::load(weight[j / kPerPanel] + j % kPerPanel * V::kLanes);
    OCTAVO_UNROLL
    for (int i = 0; i < P; ++i) weight[i] += kPanel;
    OCTAVO_UNROLL
    for (int r = 0; r < R; ++r) {
      const Vec element = V::set1(input[r][k]);
      OCTAVO_UNROLL
      for (int j = 0; j < kRegisters; ++j) sums[r][j] = V::fma(element, w[j], sums[r][j]);
    }
  }
  OCTAVO_UNROLL
  for (int r = 0; r < R; ++r)
    OCTAVO_UNROLL
    for (int j = 0; j < kRegisters; ++j) {
      const int64_t offset = j * V::kLanes, columns = columns_in(p, panel, offset);
      const int64_t at = (row + r) * p.columns + panel * kPanel + offset;
      // Once, to the finished chain: a residual in its place, as a start, would cost the small
      // products more of their digits.
      if (p.residual != nullptr && depth.last == p.depth)
        sums[r][j] = V::add(sums[r][j], load_columns<V>(p.residual + at, columns));
      store_columns<V>(p.output + at, sums[r][j], columns);
    }
}

template <class V, int R>
void advance_panels(const LinearProblem& p, int64_t row, const LinearTask& task, DepthRange depth) {
  constexpr int kPanels = panels_at_once<V, R>();
  int64_t panel = task.first_panel;
  for (; panel + kPanels <= task.last_panel; panel += kPanels)
    advance<V, R, kPanels>(p, row, panel, depth);
  for (; panel < task.last_panel; ++panel) advance<V, R, 1>(p, row, panel, depth);
}

// The rows that are left over from the full tiles: fewer than R.
template <class V, int R>
void advance_rest(const LinearProblem& p, int64_t row, const LinearTask& task, DepthRange depth) {
  if constexpr (R > 1) {
    if (task.last_row - row == R - 1)
      advance_panels<V, R - 1>(p, row, task, depth);
    else
      advance_rest<V, R - 1>(p, row, task, depth);
  }
}

template <class V>
void compute_linear(const LinearProblem& p, const LinearTask& task) {
  constexpr int R = V::kRows;
  // A single tile of rows uses each weight once: there is nothing to keep in a cache.
  const bool one_tile = task.last_row - task.first_row <= R;
  const int64_t depth_block = one_tile ? larger(p.depth, int64_t{1}) : kDepthBlock;
  const int64_t panel_block =
      one_tile ? task.last_panel - task.first_panel : kPanelsAPass;
  int64_t first = 0;
  do {  // once at least: without any depth the output is the bias
    const DepthRange depth{first, smaller(first + depth_block, p.depth)};
    for (int64_t panel = task.first_panel; panel < task.last_panel; panel += panel_block) {
      LinearTask part = task;
      part.first_panel = panel;
      part.last_panel = smaller(panel + panel_block, task.last_panel);
      int64_t row = task.first_row;
      for (; row + R <= task.last_row; row += R) advance_panels<V, R>(p, row, part, depth);
      advance_rest<V, R>(p, row, part, depth);
    }
    first += depth_block;
  } while (first < p.depth);
}

}  // namespace
}  // namespace octavo
