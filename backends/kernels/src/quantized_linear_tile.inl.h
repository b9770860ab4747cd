// A register tile of a quantised linear layer for the instruction set V: its integer sums and its
// float chains. See quantized_linear_kernel.inl.h.
#pragma once

#include "kernel_arithmetic.h"
#include "linear_columns.inl.h"
#include "quantized_linear_kernel.h"

#define OCTAVO_INLINE inline __attribute__((always_inline))

namespace octavo {
namespace {

enum class Scaling { kColumn, kGroup, kGroupMinimum };

constexpr int64_t kLine = 64;  // bytes of a cache line

// What the instances of a kernel differ in.
template <class Set, bool kNibblesOfBytes, Scaling kScalingOfWeights>
struct Variant {
  using V = Set;
  using Dot = typename Set::template Dot<kNibblesOfBytes>;
  static constexpr bool kNibbles = kNibblesOfBytes;
  static constexpr Scaling kScaling = kScalingOfWeights;
  // Bytes of a panel for each value along the depth.
  static constexpr int64_t kBytesADepth = kNibbles ? kWeightPanel / 2 : kWeightPanel;
};

// The weights of a tile's columns, all of one panel, from some depth on.
struct Weights {
  const uint8_t* bytes;
  const uint16_t* scales;
  const uint16_t* minimums;
};

// Weights that a tile fetches for those that follow it. They come from memory as one stream, panel
// after panel, which the hardware follows too late.
struct Ahead {
  Weights from;
  int64_t lines;        // of weights, for each group along the depth
  int64_t scale_lines;  // the same for scales and minimums
};

struct DepthRange {
  int64_t first;
  int64_t last;
};

template <class T, int R>
using Chains = typename T::V::Vec[R][T::Dot::kRegisters];

template <class T, int R>
using Totals = typename T::V::Int[R][T::Dot::kRegisters];

template <class Element>
OCTAVO_INLINE void fetch(const Element*& at, int64_t lines) {
  for (int64_t i = 0; i < lines; ++i, at += kLine / sizeof(Element)) __builtin_prefetch(at);
}

// The four weights of every lane of register j, k values along the depth from `bytes` on.
template <class T>
OCTAVO_INLINE typename T::Dot::Weights load_weights(const uint8_t* bytes, int k, int j) {
  using V = typename T::V;
  constexpr int64_t kStep = kWeightPanel * kDotDepth;
  bytes += j * V::kLanes * kDotDepth;
  if constexpr (T::kNibbles) {
    const auto both = V::load_bytes(bytes + k / 8 * kStep);
    return T::Dot::weights(k % 8 < 4 ? V::low_nibbles(both) : V::high_nibbles(both));
  } else {
    return T::Dot::weights(V::load_bytes(bytes + k / 4 * kStep));
  }
}

// Adds the products of one group, kGroup along the depth.
template <class T, bool kStreaming, int R>
OCTAVO_INLINE void add_products(Totals<T, R>& totals, const uint8_t* bytes,
                                const int8_t* const (&rows)[R], int64_t depth, Ahead& ahead) {
  using Dot = typename T::Dot;
  constexpr int C = Dot::kRegisters;
  typename Dot::Sum sums[R][C];
  OCTAVO_UNROLL
  for (int r = 0; r < R; ++r)
    OCTAVO_UNROLL
    for (int j = 0; j < C; ++j) Dot::begin(sums[r][j], totals[r][j]);
  OCTAVO_UNROLL
  for (int k = 0; k < kGroup; k += kDotDepth) {
    if constexpr (kStreaming) fetch(ahead.from.bytes, kDotDepth * T::kBytesADepth / kLine);
    if constexpr (R < C) {  // of both factors the fewer are held, the others pass by
      typename T::V::Activations activations[R];
      OCTAVO_UNROLL
      for (int r = 0; r < R; ++r) activations[r] = T::V::broadcast(rows[r] + depth + k);
      OCTAVO_UNROLL
      for (int j = 0; j < C; ++j) {
        const auto w = load_weights<T>(bytes, k, j);
        OCTAVO_UNROLL
        for (int r = 0; r < R; ++r) Dot::add(sums[r][j], w, activations[r]);
      }
    } else {
      typename Dot::Weights w[C];
      OCTAVO_UNROLL
      for (int j = 0; j < C; ++j) w[j] = load_weights<T>(bytes, k, j);
      OCTAVO_UNROLL
      for (int r = 0; r < R; ++r) {
        const auto activations = T::V::broadcast(rows[r] + depth + k);
        OCTAVO_UNROLL
        for (int j = 0; j < C; ++j) Dot::add(sums[r][j], w[j], activations);
      }
    }
  }
  OCTAVO_UNROLL
  for (int r = 0; r < R; ++r)
    OCTAVO_UNROLL
    for (int j = 0; j < C; ++j) Dot::end(sums[r][j], totals[r][j]);
}

// Row r's sums start from starts[r * groups].
template <class T, int R>
OCTAVO_INLINE void start(Totals<T, R>& totals, const int32_t* starts, int64_t groups) {
  OCTAVO_UNROLL
  for (int r = 0; r < R; ++r)
    OCTAVO_UNROLL
    for (int j = 0; j < T::Dot::kRegisters; ++j) totals[r][j] = T::V::set1_int(starts[r * groups]);
}

// The step of the chains that ends a group whose weights have no scales of their own.
template <class T, int R>
OCTAVO_INLINE void add_group(Chains<T, R>& chains, const Totals<T, R>& totals, const float* scales,
                             int64_t groups) {
  using V = typename T::V;
  OCTAVO_UNROLL
  for (int r = 0; r < R; ++r)
    OCTAVO_UNROLL
    for (int j = 0; j < T::Dot::kRegisters; ++j)
      chains[r][j] = V::fma(V::to_float(totals[r][j]), V::set1(scales[r * groups]), chains[r][j]);
}

// The step that ends a group of weights with scales, and minimums where T has them.
template <class T, int R>
OCTAVO_INLINE void add_scaled_group(Chains<T, R>& chains, const Totals<T, R>& totals,
                                    const Weights& weights, const float* scales, const float* sums,
                                    int64_t groups) {
  using V = typename T::V;
  OCTAVO_UNROLL
  for (int j = 0; j < T::Dot::kRegisters; ++j) {
    const typename V::Vec scale = V::load_halves(weights.scales + j * V::kLanes);
    OCTAVO_UNROLL
    for (int r = 0; r < R; ++r)
      chains[r][j] = V::fma(V::to_float(totals[r][j]),
                            V::mul(scale, V::set1(scales[r * groups])), chains[r][j]);
    if constexpr (T::kScaling == Scaling::kGroupMinimum) {
      const typename V::Vec minimum = V::load_halves(weights.minimums + j * V::kLanes);
      OCTAVO_UNROLL
      for (int r = 0; r < R; ++r)
        chains[r][j] = V::fma(minimum, V::set1(sums[r * groups]), chains[r][j]);
    }
  }
}

// Moves on by one group of weights.
template <class T>
OCTAVO_INLINE void next_group(Weights& weights) {
  weights.bytes += kGroup * T::kBytesADepth;
  if constexpr (T::kScaling != Scaling::kColumn) weights.scales += kWeightPanel;
  if constexpr (T::kScaling == Scaling::kGroupMinimum) weights.minimums += kWeightPanel;
}

// Advances the chains of R rows over a range of the depth, where `weights` begin.
template <class T, bool kStreaming, int R>
OCTAVO_INLINE void advance(const QuantizedLinearProblem& p, Weights weights, int64_t row,
                           DepthRange depth, Ahead ahead, Chains<T, R>& chains) {
  const int64_t groups = p.depth / kGroup;
  const int8_t* rows[R];
  OCTAVO_UNROLL
  for (int r = 0; r < R; ++r) rows[r] = p.quantized + (row + r) * p.depth;
  for (int64_t k = depth.first; k < depth.last; k += kGroup) {
    const int64_t group = row * groups + k / kGroup;
    if constexpr (!kStreaming) fetch(ahead.from.bytes, ahead.lines);
    if constexpr (T::kScaling != Scaling::kColumn) fetch(ahead.from.scales, ahead.scale_lines);
    if constexpr (T::kScaling == Scaling::kGroupMinimum)
      fetch(ahead.from.minimums, ahead.scale_lines);
    Totals<T, R> totals;
    start<T, R>(totals, p.starts + group, groups);
    add_products<T, kStreaming, R>(totals, weights.bytes, rows, k, ahead);
    if constexpr (T::kScaling == Scaling::kColumn)
      add_group<T, R>(chains, totals, p.scales + group, groups);
    else
      add_scaled_group<T, R>(chains, totals, weights, p.scales + group, p.scaled_sums + group,
                             groups);
    next_group<T>(weights);
  }
}

// Writes the output from finished chains.
template <class T, int R>
OCTAVO_INLINE void finish(const QuantizedLinearProblem& p, int64_t row, int64_t column,
                          const Chains<T, R>& chains) {
  using V = typename T::V;
  using Vec = typename V::Vec;
  OCTAVO_UNROLL
  for (int j = 0; j < T::Dot::kRegisters; ++j) {
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

}  // namespace
}  // namespace octavo
