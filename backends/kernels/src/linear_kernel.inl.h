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
// Lines of weights on their way while a tile computes: the memory's delay times its pace. Tiles of
// a few rows need no help, because the CPU itself looks as far ahead.
constexpr int64_t kLinesAhead = 144;
constexpr int kFewestRowsToPrefetch = 4;

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
  const float* next_weight;   // what the next tile begins with
  const float* later_weight;  // what a later one needs of one panel
  const float* start;         // where the chains begin, or null for zeros
  int64_t start_stride;
  const float* residual;  // or null
  int64_t residual_stride;
  float* output;
  int64_t output_stride;
  int64_t depth;
};

// The chains of R rows and P panels.
template <class V, int R, int P>
struct Chains {
  static constexpr int kRegisters = P * kRegistersPerPanel<V>;
  typename V::Vec sums[R][kRegisters];
};

template <class V, int R, int P>
inline void start(const LinearTile& t, Chains<V, R, P>& chains) {
  OCTAVO_UNROLL
  for (int r = 0; r < R; ++r)
    OCTAVO_UNROLL
    for (int j = 0; j < chains.kRegisters; ++j)
      chains.sums[r][j] = t.start == nullptr
                              ? V::set1(0.0f)
                              : V::load(t.start + r * t.start_stride + j * V::kLanes);
}

template <class V, int R, int P>
inline void finish(const LinearTile& t, Chains<V, R, P>& chains) {
  OCTAVO_UNROLL
  for (int r = 0; r < R; ++r)
    OCTAVO_UNROLL
    for (int j = 0; j < chains.kRegisters; ++j) {
      auto& sum = chains.sums[r][j];
      const int64_t column = j * V::kLanes;
      if (t.residual != nullptr)
        sum = V::add(sum, V::load(t.residual + r * t.residual_stride + column));
      V::store(t.output + r * t.output_stride + column, sum);
    }
}

// Adds the products at one depth: input[r][k] times the weights of P panels.
template <class V, int R, int P>
inline void step(Chains<V, R, P>& chains, const float* const (&input)[R],
                 const float* const (&weight)[P], int64_t k) {
  constexpr int kPerPanel = kRegistersPerPanel<V>;
  typename V::Vec w[P * kPerPanel];
  OCTAVO_UNROLL
  for (int j = 0; j < P * kPerPanel; ++j)
    w[j] = V::load(weight[j / kPerPanel] + k * kPanel + j % kPerPanel * V::kLanes);
  OCTAVO_UNROLL
  for (int r = 0; r < R; ++r) {
    const auto element = V::set1(input[r][k]);
    OCTAVO_UNROLL
    for (int j = 0; j < P * kPerPanel; ++j)
      chains.sums[r][j] = V::fma(element, w[j], chains.sums[r][j]);
  }
}

template <class V, int R, int P>
void advance(const LinearTile& t) {
  constexpr int64_t kAhead = kLinesAhead / P;
  const float* input[R];
  const float* weight[P];
  OCTAVO_UNROLL
  for (int r = 0; r < R; ++r) input[r] = t.input + r * t.input_stride;
  OCTAVO_UNROLL
  for (int i = 0; i < P; ++i) weight[i] = t.weight + i * t.panel_stride;
  Chains<V, R, P> chains;
  start<V, R, P>(t, chains);
  // The last steps fetch what the next tile begins with.
  const int64_t turn = larger(t.depth - kAhead, int64_t{0});
  const int64_t to_next = t.next_weight - t.weight - t.depth * kPanel;
  for (int64_t k = 0, end = turn; k < t.depth; end = t.depth) {
    const int64_t ahead = kAhead * kPanel + (k < turn ? 0 : to_next);
    for (; k < end; ++k) {
      if constexpr (R >= kFewestRowsToPrefetch) {
        OCTAVO_UNROLL
        for (int i = 0; i < P; ++i) __builtin_prefetch(weight[i] + ahead + k * kPanel);
        __builtin_prefetch(t.later_weight + k * kPanel, 0, 2);
      }
      step<V, R, P>(chains, input, weight, k);
    }
  }
  finish<V, R, P>(t, chains);
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
  t.next_weight = t.later_weight = t.weight;
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

// The tiles of rows that share some panels. Where there are several, each fetches one of the panels
// that come next into the second-level cache, so that the first tile there need not wait.
template <class V>
void advance_panel_group(const LinearProblem& p, const LinearTask& task, DepthRange depth,
                         int64_t panel, int64_t panels, bool is_last) {
  const int64_t all_rows = task.last_row - task.first_row;
  const int64_t most_rows = rows_of_tile<V>(all_rows);
  int64_t index = 0;
  for_even_parts(task.first_row, task.last_row, most_rows, [&](int64_t row, int64_t rows) {
    LinearTile t = tile_at(p, row, panel, depth);
    const float* next_group = t.weight + panels * t.panel_stride;
    if (!is_last && row + rows == task.last_row) t.next_weight = next_group;
    if (!is_last && index < panels && all_rows > most_rows)
      t.later_weight = next_group + index * t.panel_stride;
    advance_rows<V>(t, rows, panels);
    ++index;
  });
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
    for_even_parts(task.first_panel, whole_panels, panels_for_rows<V>(rows),
                   [&](int64_t panel, int64_t panels) {
                     const bool is_last = panel + panels == whole_panels;
                     advance_panel_group<V>(p, task, depth, panel, panels, is_last);
                   });
    if (whole_panels < task.last_panel)
      for_even_parts(task.first_row, task.last_row, most_rows, [&](int64_t row, int64_t count) {
        advance_partial_panel<V>(tile_at(p, row, whole_panels, depth), count,
                                 p.columns - whole_panels * kPanel);
      });
    first += depth_block;
  } while (first < p.depth);
}

template <class V>
constexpr LinearKernel kLinearKernel{kMaxTileRows<V>, panels_for_rows<V>, compute_linear<V>};

}  // namespace
}  // namespace octavo
