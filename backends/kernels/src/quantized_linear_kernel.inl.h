// A linear layer of quantised weights for the instruction set V. Included once by each
// quantized_linear_<set>.cc; everything is in an unnamed namespace, see
// paged_attention_kernel.inl.h.
//
// Exactness. Within a group products are summed as integers, from -zero_point * (the activations'
// sum) on, which no order changes. An element of the output is then one chain of fused
// multiply-adds over the groups, see README.md. Tiles decide which rows and columns share
// registers, blocks of depth when a chain rests in memory; neither changes it.
#pragma once

#include "quantized_linear_tile.inl.h"

namespace octavo {
namespace {

// A block of a panel's weights, at most 8 KiB, and the one that is fetched meanwhile stay in the
// first-level cache while the rows go by.
constexpr int64_t kDepthBlock = 256;
// Rows of a tile that does so little with a weight that it has to fetch ahead at every step.
constexpr int kStreamingRows = 2;
constexpr int64_t kStreamingDistance = 4096;  // bytes

// One tile of rows over a range of the depth, its chains resting in `resting` between two ranges.
template <class T, bool kStreaming, int R>
void pass_tile(const QuantizedLinearProblem& p, const Weights& weights, int64_t row, int64_t column,
               DepthRange depth, const Ahead& ahead, float* resting) {
  using V = typename T::V;
  constexpr int C = T::Dot::kRegisters;
  Chains<T, R> chains;
  OCTAVO_UNROLL
  for (int r = 0; r < R; ++r)
    OCTAVO_UNROLL
    for (int j = 0; j < C; ++j)
      chains[r][j] =
          depth.first == 0 ? V::set1(0.0f) : V::load(resting + (r * C + j) * V::kLanes);
  advance<T, kStreaming, R>(p, weights, row, depth, ahead, chains);
  if (depth.last == p.depth) {
    finish<T, R>(p, row, column, chains);
    return;
  }
  OCTAVO_UNROLL
  for (int r = 0; r < R; ++r)
    OCTAVO_UNROLL
    for (int j = 0; j < C; ++j) V::store(resting + (r * C + j) * V::kLanes, chains[r][j]);
}

// A task's rows over a range of the depth, in `tiles` whose heights differ by one at most.
template <class T, int R>
void pass_rows(const QuantizedLinearProblem& p, const QuantizedLinearTask& task, int64_t tiles,
               const Weights& weights, int64_t column, DepthRange depth, Ahead ahead,
               float* resting) {
  const int64_t rows = task.last_row - task.first_row;
  if constexpr (R > 1)
    if (rows <= (R - 1) * tiles)
      return pass_rows<T, R - 1>(p, task, tiles, weights, column, depth, ahead, resting);
  if constexpr (R <= kStreamingRows)
    if (tiles == 1)
      return pass_tile<T, true, R>(p, weights, task.first_row, column, depth, ahead, resting);
  const int64_t higher = rows - (R - 1) * tiles;
  int64_t row = task.first_row;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int height = tile < higher ? R : R - 1;
    if (tile < higher)
      pass_tile<T, false, R>(p, weights, row, column, depth, ahead, resting);
    else if constexpr (R > 1)
      pass_tile<T, false, R - 1>(p, weights, row, column, depth, ahead, resting);
    row += height;
    resting += height * T::Dot::kRegisters * T::V::kLanes;
    ahead.from.bytes += ahead.lines * kLine * ((depth.last - depth.first) / kGroup);
    ahead.scale_lines = 0;
  }
}

// The weights from a column and depth on.
template <class T>
Weights weights_at(const QuantizedLinearProblem& p, int64_t column, int64_t depth) {
  const int64_t first = column / kWeightPanel * p.depth + depth, within = column % kWeightPanel;
  const int64_t scale = first / kGroup * kWeightPanel + within;
  Weights w{};
  w.bytes = p.weight + first * T::kBytesADepth + within * kDotDepth;
  if constexpr (T::kScaling != Scaling::kColumn) w.scales = p.group_scales + scale;
  if constexpr (T::kScaling == Scaling::kGroupMinimum) w.minimums = p.group_minimums + scale;
  return w;
}

// What each of `tiles` fetches so that together they fetch what lies `distance` along the depth
// behind `weights`, possibly in the next panel. Nothing is read, so the end needs no care.
template <class T>
Ahead fetched_ahead(Weights weights, int64_t distance, int64_t tiles) {
  const int64_t lines = kGroup * T::kBytesADepth / kLine;
  weights.bytes += distance * T::kBytesADepth;
  if constexpr (T::kScaling != Scaling::kColumn)
    weights.scales += distance / kGroup * kWeightPanel;
  if constexpr (T::kScaling == Scaling::kGroupMinimum)
    weights.minimums += distance / kGroup * kWeightPanel;
  return {weights, (lines + tiles - 1) / tiles, 1};
}

// The columns of one tile for all rows of a task.
template <class T>
void compute_columns(const QuantizedLinearProblem& p, const QuantizedLinearTask& task,
                     int64_t column, float* resting) {
  constexpr int R = T::Dot::kRows;
  const int64_t rows = task.last_row - task.first_row, tiles = (rows + R - 1) / R;
  // A single tile uses each weight once: there is nothing to keep in a cache.
  const int64_t block = tiles == 1 ? larger(p.depth, int64_t{1}) : kDepthBlock;
  const int64_t distance =
      rows <= kStreamingRows ? kStreamingDistance / T::kBytesADepth : kDepthBlock;
  int64_t first = 0;
  do {  // once at least: without any depth the output is the bias
    const DepthRange depth{first, smaller(first + block, p.depth)};
    const Weights weights = weights_at<T>(p, column, first);
    pass_rows<T, R>(p, task, tiles, weights, column, depth,
                    fetched_ahead<T>(weights, distance, tiles), resting);
    first += block;
  } while (first < p.depth);
}

template <class T>
void compute_task(const QuantizedLinearProblem& p, const QuantizedLinearTask& task,
                  float* resting) {
  constexpr int kColumns = T::Dot::kRegisters * T::V::kLanes;
  static_assert(kWeightPanel % kColumns == 0);
  const int64_t last = task.last_panel * kWeightPanel;
  for (int64_t column = task.first_panel * kWeightPanel; column < last; column += kColumns)
    compute_columns<T>(p, task, column, resting);
}

template <class V, bool kNibbles>
void choose_scaling(const QuantizedLinearProblem& p, const QuantizedLinearTask& task,
                    float* resting) {
  if (p.group_scales == nullptr)
    compute_task<Variant<V, kNibbles, Scaling::kColumn>>(p, task, resting);
  else if (p.group_minimums == nullptr)
    compute_task<Variant<V, kNibbles, Scaling::kGroup>>(p, task, resting);
  else
    compute_task<Variant<V, kNibbles, Scaling::kGroupMinimum>>(p, task, resting);
}

template <class V>
void compute_quantized_linear(const QuantizedLinearProblem& p, const QuantizedLinearTask& task,
                              float* resting) {
  if (p.bits == 4)
    choose_scaling<V, true>(p, task, resting);
  else
    choose_scaling<V, false>(p, task, resting);
}

inline void prepare_quantized_linear(const QuantizedLinearProblem& p) {
  const int64_t groups = p.rows * (p.depth / kGroup);
  // Unsigned, so that sums which no Quantize made wrap around instead of being undefined.
  const uint32_t factor = -static_cast<uint32_t>(p.zero_point);
  for (int64_t g = 0; g < groups; ++g)
    p.starts[g] = static_cast<int32_t>(factor * static_cast<uint32_t>(p.sums[g]));
  if (p.group_minimums == nullptr) return;
  for (int64_t g = 0; g < groups; ++g)
    p.scaled_sums[g] = p.scales[g] * static_cast<float>(p.sums[g]);
}

template <class V>
constexpr QuantizedLinearKernel kQuantizedLinear{prepare_quantized_linear,
                                                 compute_quantized_linear<V>};

}  // namespace
}  // namespace octavo
