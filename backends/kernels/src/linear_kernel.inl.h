// A linear layer for the instruction set V. Included once by each linear_<set>.cc; everything is in
// an unnamed namespace, see paged_attention_kernel.inl.h.
//
// Exactness. An element of the output is one chain of fused multiply-adds over the depth, from the
// bias on, to which the residual is added. Tiles decide which rows and columns share registers,
// blocks of depth when a chain rests in memory; neither changes it. So a row has the same bits in
// every batch, and on every instruction set that multiplies and adds in one rounding.
#pragma once

#include "kernel_arithmetic.h"
#include "linear_kernel.h"

namespace octavo {
namespace {

// A chain rests in memory after this many steps where several tiles of rows share the weights, so
// that the weights of a tile stay in the second-level cache while the rows go by.
constexpr int64_t kDepthBlock = 512;
// Streams of weights that the hardware still prefetches well.
constexpr int kMaxPanelsAtOnce = 4;

template <class V>
constexpr int kRegistersPerPanel = kPanel / V::kLanes;

// Rows of a tile where there are many: three panels beside eight rows need the fewest loads.
template <class V>
constexpr int kTileRows =
    kRegistersPerPanel<V> == 1 ? V::kAccumulators / 3 : V::kAccumulators / kRegistersPerPanel<V>;

// Rows that are still one tile, which reads every weight once.
template <class V>
constexpr int kMaxTileRows = kRegistersPerPanel<V> == 1 ? V::kAccumulators / 2 : kTileRows<V>;

template <class V, int R>
constexpr int panels_at_once() {
  constexpr int kFit = V::kAccumulators / (R * kRegistersPerPanel<V>);
  return kFit < kMaxPanelsAtOnce ? kFit : kMaxPanelsAtOnce;
}

// Some rows and whole panels of the output, over a range of the depth.
struct LinearTile {
  const float* input;
  int64_t input_stride;
  const float* weight;
  int64_t panel_stride;
  const float* start;  // where the chains begin, or null for zeros
  int64_t start_stride;
  const float* residual;  // or null
  int64_t residual_stride;
  float* output;
  int64_t output_stride;
  int64_t depth;
};

// Advances the chains of R rows and P panels.
template <class V, int R, int P>
void advance(const LinearTile& t) {
  using Vec = typename V::Vec;
  constexpr int kRegisters = P * kRegistersPerPanel<V>;
  Vec sums[R][kRegisters];
  OCTAVO_UNROLL
  for (int r = 0; r < R; ++r)
    OCTAVO_UNROLL
    for (int j = 0; j < kRegisters; ++j)
      sums[r][j] = t.start == nullptr ? V::set1(0.0f)
                                      : V::load(t.start + r * t.start_stride + j * V::kLanes);
  const float* input[R];
  OCTAVO_UNROLL
  for (int r = 0; r < R; ++r) input[r] = t.input + r * t.input_stride;
  const float* weight[P];
  OCTAVO_UNROLL
  for (int i = 0; i < P; ++i) weight[i] = t.weight + i * t.panel_stride;
  for (int64_t k = 0; k < t.depth; ++k) {
    Vec w[kRegisters];
    OCTAVO_UNROLL
    for (int j = 0; j < kRegisters; ++j)
      w[j] = V::load(weight[j / kRegistersPerPanel<V>] + k * kPanel +
                     j % kRegistersPerPanel<V> * V::kLanes);
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
      if (t.residual != nullptr)
        sums[r][j] =
            V::add(sums[r][j], V::load(t.residual + r * t.residual_stride + j * V::kLanes));
      V::store(t.output + r * t.output_stride + j * V::kLanes, sums[r][j]);
    }
}

template <class V, int R, int P = panels_at_once<V, R>()>
void advance_panels(const LinearTile& t, int64_t panels) {
  if constexpr (P > 1)
    if (panels < P) return advance_panels<V, R, P - 1>(t, panels);
  advance<V, R, P>(t);
}

template <class V, int R = kMaxTileRows<V>>
void advance_rows(const LinearTile& t, int64_t rows, int64_t panels) {
  if constexpr (R > 1)
    if (rows < R) return advance_rows<V, R - 1>(t, rows, panels);
  advance_panels<V, R>(t, panels);
}

template <class V, int R = kMaxTileRows<V>>
int64_t panels_of_tile(int64_t rows) {
  if constexpr (R > 1)
    if (rows < R) return panels_of_tile<V, R - 1>(rows);
  return panels_at_once<V, R>();
}

struct DepthRange {
  int64_t first;
  int64_t last;
};

inline LinearTile tile_at(const LinearProblem& p, int64_t row, int64_t panel, DepthRange depth) {
  const int64_t at = row * p.columns + panel * kPanel;
  LinearTile t{};
  t.input = p.input + row * p.depth + depth.first;
  t.input_stride = p.depth;
  t.weight = p.weight + (panel * p.depth + depth.first) * kPanel;
  t.panel_stride = p.depth * kPanel;
  t.output = p.output + at;
  t.output_stride = t.residual_stride = p.columns;
  t.depth = depth.last - depth.first;
  if (depth.first > 0) {
    t.start = t.output;
    t.start_stride = p.columns;
  } else if (p.bias != nullptr) {
    t.start = p.bias + panel * kPanel;
  }
  if (p.residual != nullptr && depth.last == p.depth) t.residual = p.residual + at;
  return t;
}

inline void copy_columns(float* to, int64_t to_stride, const float* from, int64_t from_stride,
                         int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c) to[r * to_stride + c] = from[r * from_stride + c];
}

// The last panel of a matrix may have fewer columns than the registers: it is computed in a buffer.
template <class V>
void advance_partial_panel(LinearTile t, int64_t rows, int64_t columns) {
  float sums[kMaxTileRows<V> * kPanel] = {}, residual[kMaxTileRows<V> * kPanel] = {};
  const LinearTile whole = t;
  if (t.start != nullptr) copy_columns(sums, kPanel, t.start, t.start_stride, rows, columns);
  t.start = t.output = sums;
  t.start_stride = t.output_stride = t.residual_stride = kPanel;
  if (t.residual != nullptr) {
    copy_columns(residual, kPanel, t.residual, whole.residual_stride, rows, columns);
    t.residual = residual;
  }
  advance_rows<V>(t, rows, 1);
  copy_columns(whole.output, whole.output_stride, sums, kPanel, rows, columns);
}

// Calls body(first, count) for parts of [first, last) of at most `most`, of nearly equal size.
template <class Body>
inline void for_even_parts(int64_t first, int64_t last, int64_t most, const Body& body) {
  const int64_t parts = (last - first + most - 1) / most;
  for (int64_t i = 0; i < parts; ++i) {
    const int64_t begin = first + (last - first) * i / parts;
    body(begin, first + (last - first) * (i + 1) / parts - begin);
  }
}

template <class V>
int64_t rows_of_tile(int64_t rows) {
  return rows <= kMaxTileRows<V> ? rows : kTileRows<V>;
}

template <class V>
int64_t panels_for_rows(int64_t rows) {
  return panels_of_tile<V>(rows_of_tile<V>(rows));
}

template <class V>
void compute_linear(const LinearProblem& p, const LinearTask& task) {
  const int64_t rows = task.last_row - task.first_row, most_rows = rows_of_tile<V>(rows);
  // A single tile of rows uses each weight once: there is nothing to keep in a cache.
  const int64_t depth_block = rows <= most_rows ? larger(p.depth, int64_t{1}) : kDepthBlock;
  const int64_t whole_panels = smaller(task.last_panel, p.columns / kPanel);
  int64_t first = 0;
  do {  // once at least: without any depth the output is the bias
    const DepthRange depth{first, smaller(first + depth_block, p.depth)};
    const auto for_each_tile = [&](const auto& body) {
      for_even_parts(task.first_row, task.last_row, most_rows, body);
    };
    for_even_parts(task.first_panel, whole_panels, panels_for_rows<V>(rows),
                   [&](int64_t panel, int64_t panels) {
                     for_each_tile([&](int64_t row, int64_t count) {
                       advance_rows<V>(tile_at(p, row, panel, depth), count, panels);
                     });
                   });
    if (whole_panels < task.last_panel)
      for_each_tile([&](int64_t row, int64_t count) {
        advance_partial_panel<V>(tile_at(p, row, whole_panels, depth), count,
                                 p.columns - whole_panels * kPanel);
      });
    first += depth_block;
  } while (first < p.depth);
}

template <class V>
constexpr LinearKernel kLinearKernel{panels_for_rows<V>, compute_linear<V>};

}  // namespace
}  // namespace octavo
