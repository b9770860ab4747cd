// A linear layer of quantised weights for the instruction set V. Included once by each
// quantized_linear_<set>.cc; everything is in an unnamed namespace, see
// paged_attention_kernel.inl.h.
//
// Exactness. Within a group products are summed as integers, from -zero_point * (the activations'
// sum) on, which no order changes. An element of the output is then one chain of fused
// multiply-adds over the groups, see README.md. Tiles decide which rows and columns share
// registers, blocks of depth when a chain rests in memory; neither changes it.
#pragma once

#include "kernel_arithmetic.h"
#include "linear_columns.inl.h"
#include "quantized_linear_kernel.h"

namespace octavo {
namespace {

enum class Scaling { kColumn, kGroup, kGroupMinimum };

// How a tile finds its weights: bytes as they are in the engine, nibbles as they are in the engine,
// or nibbles that were unpacked to bytes in the scratch memory, their scales to floats.
enum class Format { kBytes, kNibbles, kUnpacked };

template <Format>
struct ScaleOf {
  using Type = uint16_t;
};
template <>
struct ScaleOf<Format::kUnpacked> {
  using Type = float;
};

// The weights of a tile's columns, from some depth on.
template <Format kFormat>
struct Weights {
  using Scale = typename ScaleOf<kFormat>::Type;
  const uint8_t* bytes;
  const Scale* scales;
  const Scale* minimums;
  int64_t bytes_a_panel;
  int64_t scales_a_panel;
};

struct DepthRange {
  int64_t first;
  int64_t last;
};

template <class V, int R, int C>
using Chains = typename V::Vec[R][C];

// Where register j of a tile is, with four bytes or one scale a column.
template <class V>
constexpr int64_t panel_of(int j) {
  return j * V::kLanes / kWeightPanel;
}
template <class V>
constexpr int64_t column_of(int j) {
  return j * V::kLanes % kWeightPanel;
}

// Adds the products of one group of weights, kWeightGroup along the depth.
template <class V, Format kFormat, int R, int C>
inline __attribute__((always_inline)) void add_products(
    typename V::Int (&totals)[R][C], const uint8_t* weights, int64_t bytes_a_panel,
    const int8_t* const (&rows)[R], int64_t depth) {
  using Dot = typename V::template Dot<kFormat != Format::kBytes>;
  using Bytes = typename V::Bytes;
  constexpr int kStep = kWeightPanel * kDotDepth;
  typename Dot::Sum sums[R][C];
  OCTAVO_UNROLL
  for (int r = 0; r < R; ++r)
    OCTAVO_UNROLL
    for (int j = 0; j < C; ++j) sums[r][j] = Dot::begin(totals[r][j]);
  if constexpr (kFormat == Format::kNibbles) {
    OCTAVO_UNROLL
    for (int k = 0; k < kWeightGroup; k += 2 * kDotDepth, weights += kStep) {
      OCTAVO_UNROLL
      for (int j = 0; j < C; ++j) {
        const Bytes both =
            V::load_bytes(weights + panel_of<V>(j) * bytes_a_panel + column_of<V>(j) * kDotDepth);
        const auto first = Dot::weights(V::low_nibbles(both));
        const auto second = Dot::weights(V::high_nibbles(both));
        OCTAVO_UNROLL
        for (int r = 0; r < R; ++r) {
          const int8_t* row = rows[r] + depth + k;
          sums[r][j] = Dot::add(sums[r][j], first, V::broadcast(row));
          sums[r][j] = Dot::add(sums[r][j], second, V::broadcast(row + kDotDepth));
        }
      }
    }
  } else {
    OCTAVO_UNROLL
    for (int k = 0; k < kWeightGroup; k += kDotDepth, weights += kStep) {
      Bytes activations[R];
      OCTAVO_UNROLL
      for (int r = 0; r < R; ++r) activations[r] = V::broadcast(rows[r] + depth + k);
      OCTAVO_UNROLL
      for (int j = 0; j < C; ++j) {
        const auto w = Dot::weights(V::load_bytes(weights + panel_of<V>(j) * bytes_a_panel +
                                                  column_of<V>(j) * kDotDepth));
        OCTAVO_UNROLL
        for (int r = 0; r < R; ++r) sums[r][j] = Dot::add(sums[r][j], w, activations[r]);
      }
    }
  }
  OCTAVO_UNROLL
  for (int r = 0; r < R; ++r)
    OCTAVO_UNROLL
    for (int j = 0; j < C; ++j) totals[r][j] = Dot::end(sums[r][j], totals[r][j]);
}

template <class V, int R, int C>
inline __attribute__((always_inline)) void start(typename V::Int (&totals)[R][C],
                                                 const int32_t* starts, int64_t groups) {
  OCTAVO_UNROLL
  for (int r = 0; r < R; ++r)
    OCTAVO_UNROLL
    for (int j = 0; j < C; ++j) totals[r][j] = V::set1_int(starts[r * groups]);
}

// Advances the chains of R rows and C registers of columns over a range of the depth. `weights`
// begin at the range's first depth.
template <class V, Format kFormat, Scaling kScaling, int R, int C>
inline __attribute__((always_inline)) void advance(const QuantizedLinearProblem& p,
                                                   const Weights<kFormat>& weights, int64_t row,
                                                   DepthRange depth, Chains<V, R, C>& chains) {
  constexpr int kBytes = kWeightGroup * kWeightPanel / (kFormat == Format::kNibbles ? 2 : 1);
  const int64_t groups = p.depth / kActivationGroup;
  const int8_t* rows[R];
  OCTAVO_UNROLL
  for (int r = 0; r < R; ++r) rows[r] = p.quantized + (row + r) * p.depth;
  const uint8_t* bytes = weights.bytes;
  int64_t scale_at = 0;
  for (int64_t g = depth.first / kActivationGroup; g < depth.last / kActivationGroup; ++g) {
    const float* scales = p.scales + row * groups + g;
    typename V::Int totals[R][C];
    if constexpr (kScaling == Scaling::kColumn) {
      start<V, R, C>(totals, p.starts + row * groups + g, groups);
      add_products<V, kFormat, R, C>(totals, bytes, weights.bytes_a_panel, rows,
                                     g * kActivationGroup);
      add_products<V, kFormat, R, C>(totals, bytes + kBytes, weights.bytes_a_panel, rows,
                                     g * kActivationGroup + kWeightGroup);
      OCTAVO_UNROLL
      for (int r = 0; r < R; ++r)
        OCTAVO_UNROLL
        for (int j = 0; j < C; ++j)
          chains[r][j] =
              V::fma(V::to_float(totals[r][j]), V::set1(scales[r * groups]), chains[r][j]);
      bytes += 2 * kBytes;
    } else {
      for (int half = 0; half < 2; ++half) {
        const int64_t group = row * 2 * groups + 2 * g + half;
        start<V, R, C>(totals, p.starts + group, 2 * groups);
        add_products<V, kFormat, R, C>(totals, bytes, weights.bytes_a_panel, rows,
                                       g * kActivationGroup + half * kWeightGroup);
        OCTAVO_UNROLL
        for (int j = 0; j < C; ++j) {
          const int64_t at = panel_of<V>(j) * weights.scales_a_panel + column_of<V>(j) + scale_at;
          const typename V::Vec scale = V::load_scale(weights.scales + at);
          OCTAVO_UNROLL
          for (int r = 0; r < R; ++r)
            chains[r][j] = V::fma(V::to_float(totals[r][j]),
                                  V::mul(scale, V::set1(scales[r * groups])), chains[r][j]);
          if constexpr (kScaling == Scaling::kGroupMinimum) {
            const typename V::Vec minimum = V::load_scale(weights.minimums + at);
            OCTAVO_UNROLL
            for (int r = 0; r < R; ++r)
              chains[r][j] =
                  V::fma(minimum, V::set1(p.sums[group + r * 2 * groups]), chains[r][j]);
          }
        }
        bytes += kBytes;
        scale_at += kWeightPanel;
      }
    }
  }
}

// Writes the output from finished chains.
template <class V, int R, int C>
inline void finish(const QuantizedLinearProblem& p, int64_t row, int64_t column,
                   const Chains<V, R, C>& chains) {
  using Vec = typename V::Vec;
  OCTAVO_UNROLL
  for (int j = 0; j < C; ++j) {
    const int64_t at = column + j * V::kLanes, columns = p.columns - at;
    const Vec scale =
        p.column_scales ? load_columns<V>(p.column_scales + at, columns) : V::set1(1.0f);
    const Vec bias = p.bias ? load_columns<V>(p.bias + at, columns) : V::set1(0.0f);
    OCTAVO_UNROLL
    for (int r = 0; r < R; ++r) {
      const int64_t element = (row + r) * p.columns + at;
      Vec value = V::fma(chains[r][j], scale, bias);
      if (p.residual) value = V::add(value, load_columns<V>(p.residual + element, columns));
      store_columns<V>(p.output + element, value, columns);
    }
  }
}

// The weights of the columns from `column` on, as they lie in the engine.
template <Format kFormat>
Weights<kFormat> packed_weights(const QuantizedLinearProblem& p, int64_t column, int64_t depth) {
  const int64_t panel = column / kWeightPanel, within = column % kWeightPanel;
  const int64_t values_a_byte = kFormat == Format::kNibbles ? 2 : 1;
  Weights<kFormat> w{};
  w.bytes_a_panel = p.depth * kWeightPanel / values_a_byte;
  w.bytes = p.weight + panel * w.bytes_a_panel + depth * kWeightPanel / values_a_byte +
            within * kDotDepth;
  w.scales_a_panel = p.depth;  // kWeightPanel for each kWeightGroup, and the two are equal
  const int64_t scale = panel * w.scales_a_panel + depth + within;
  if (p.group_scales) w.scales = p.group_scales + scale;
  if (p.group_minimums) w.minimums = p.group_minimums + scale;
  return w;
}
static_assert(kWeightPanel == kWeightGroup);

// Unpacks a block of C registers of columns into the scratch memory.
template <class V, int C>
Weights<Format::kUnpacked> unpack(const QuantizedLinearProblem& p, int64_t column, DepthRange depth,
                                  QuantizedLinearScratch& scratch) {
  constexpr int kStep = kWeightPanel * kDotDepth;
  const auto packed = packed_weights<Format::kNibbles>(p, column, depth.first);
  const int64_t steps = (depth.last - depth.first) / (2 * kDotDepth);
  const int64_t groups = (depth.last - depth.first) / kWeightGroup;
  for (int j = 0; j < C; ++j) {
    const uint8_t* from =
        packed.bytes + panel_of<V>(j) * packed.bytes_a_panel + column_of<V>(j) * kDotDepth;
    uint8_t* to =
        scratch.weights + panel_of<V>(j) * kDepthBlock * kWeightPanel + column_of<V>(j) * kDotDepth;
    for (int64_t step = 0; step < steps; ++step, from += kStep, to += 2 * kStep) {
      const typename V::Bytes both = V::load_bytes(from);
      V::store_bytes(to, V::low_nibbles(both));
      V::store_bytes(to + kStep, V::high_nibbles(both));
    }
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t at = panel_of<V>(j) * packed.scales_a_panel + column_of<V>(j) + g * kWeightPanel;
      const int64_t into = panel_of<V>(j) * kDepthBlock + column_of<V>(j) + g * kWeightPanel;
      if (packed.scales) V::store(scratch.scales + into, V::load_scale(packed.scales + at));
      if (packed.minimums) V::store(scratch.minimums + into, V::load_scale(packed.minimums + at));
    }
  }
  return {scratch.weights, scratch.scales, scratch.minimums, kDepthBlock * kWeightPanel,
          kDepthBlock};
}

// One tile of rows over the whole depth: every weight is used once.
template <class V, Format kFormat, Scaling kScaling, int R, int C>
void pass_once(const QuantizedLinearProblem& p, int64_t row, int64_t column) {
  Chains<V, R, C> chains;
  OCTAVO_UNROLL
  for (int r = 0; r < R; ++r)
    OCTAVO_UNROLL
    for (int j = 0; j < C; ++j) chains[r][j] = V::set1(0.0f);
  advance<V, kFormat, kScaling, R, C>(p, packed_weights<kFormat>(p, column, 0), row, {0, p.depth},
                                      chains);
  finish<V, R, C>(p, row, column, chains);
}

// One tile of rows over a block of the depth, its chains resting in `resting`.
template <class V, Format kFormat, Scaling kScaling, int R, int C>
void pass_block(const QuantizedLinearProblem& p, const Weights<kFormat>& weights, int64_t row,
                int64_t column, DepthRange depth, float* resting) {
  Chains<V, R, C> chains;
  OCTAVO_UNROLL
  for (int r = 0; r < R; ++r)
    OCTAVO_UNROLL
    for (int j = 0; j < C; ++j)
      chains[r][j] =
          depth.first == 0 ? V::set1(0.0f) : V::load(resting + (r * C + j) * V::kLanes);
  advance<V, kFormat, kScaling, R, C>(p, weights, row, depth, chains);
  if (depth.last == p.depth) {
    finish<V, R, C>(p, row, column, chains);
    return;
  }
  OCTAVO_UNROLL
  for (int r = 0; r < R; ++r)
    OCTAVO_UNROLL
    for (int j = 0; j < C; ++j) V::store(resting + (r * C + j) * V::kLanes, chains[r][j]);
}

// The rows of a task, or what is left of them, in tiles of at most R.
template <class V, Format kFormat, Scaling kScaling, int R, int C>
void pass_rows(const QuantizedLinearProblem& p, const Weights<kFormat>& weights, int64_t row,
               int64_t last_row, int64_t column, DepthRange depth, float* resting) {
  for (; row + R <= last_row; row += R, resting += R * C * V::kLanes)
    pass_block<V, kFormat, kScaling, R, C>(p, weights, row, column, depth, resting);
  if constexpr (R > 1)
    pass_rows<V, kFormat, kScaling, R - 1, C>(p, weights, row, last_row, column, depth, resting);
}

// The columns of one tile for all rows of a task.
template <class V, bool kNibbles, Scaling kScaling, int R, int C>
void compute_columns(const QuantizedLinearProblem& p, const QuantizedLinearTask& task,
                     int64_t column, QuantizedLinearScratch& scratch) {
  if (task.last_row - task.first_row == R) {
    pass_once<V, kNibbles ? Format::kNibbles : Format::kBytes, kScaling, R, C>(p, task.first_row,
                                                                               column);
  } else if constexpr (R > 1) {
    compute_columns<V, kNibbles, kScaling, R - 1, C>(p, task, column, scratch);
  } else {
    int64_t first = 0;
    do {  // once at least: without any depth the output is the bias
      const DepthRange depth{first, smaller(first + kDepthBlock, p.depth)};
      if constexpr (kNibbles)
        pass_rows<V, Format::kUnpacked, kScaling, V::kRows, C>(
            p, unpack<V, C>(p, column, depth, scratch), task.first_row, task.last_row, column,
            depth, scratch.chains);
      else
        pass_rows<V, Format::kBytes, kScaling, V::kRows, C>(
            p, packed_weights<Format::kBytes>(p, column, first), task.first_row, task.last_row,
            column, depth, scratch.chains);
      first += kDepthBlock;
    } while (first < p.depth);
  }
}

template <class V, bool kNibbles, Scaling kScaling>
void compute_task(const QuantizedLinearProblem& p, const QuantizedLinearTask& task,
                  QuantizedLinearScratch& scratch) {
  constexpr int kColumns = V::kRegisters * V::kLanes, kInPanel = kWeightPanel / V::kLanes;
  static_assert(kColumns <= kWidestTile && V::kRows <= kRowBlock);
  int64_t column = task.first_panel * kWeightPanel;
  const int64_t last = task.last_panel * kWeightPanel;
  for (; column + kColumns <= last; column += kColumns)
    compute_columns<V, kNibbles, kScaling, V::kRows, V::kRegisters>(p, task, column, scratch);
  if constexpr (V::kRegisters > kInPanel)
    for (; column < last; column += kWeightPanel)
      compute_columns<V, kNibbles, kScaling, V::kRows, kInPanel>(p, task, column, scratch);
}

template <class V, bool kNibbles>
void choose_scaling(const QuantizedLinearProblem& p, const QuantizedLinearTask& task,
                    QuantizedLinearScratch& scratch) {
  if (p.group_scales == nullptr)
    compute_task<V, kNibbles, Scaling::kColumn>(p, task, scratch);
  else if (p.group_minimums == nullptr)
    compute_task<V, kNibbles, Scaling::kGroup>(p, task, scratch);
  else
    compute_task<V, kNibbles, Scaling::kGroupMinimum>(p, task, scratch);
}

template <class V>
void compute_quantized_linear(const QuantizedLinearProblem& p, const QuantizedLinearTask& task,
                              QuantizedLinearScratch& scratch) {
  if (p.bits == 4)
    choose_scaling<V, true>(p, task, scratch);
  else
    choose_scaling<V, false>(p, task, scratch);
}

}  // namespace
}  // namespace octavo
