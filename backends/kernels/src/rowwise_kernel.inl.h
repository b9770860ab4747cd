// Norms, activations and the quantisation of rows for the instruction set V. Included once by each
// rowwise_<set>.cc after the set's int8_*.h; everything is in an unnamed namespace, see
// paged_attention_kernel.inl.h.
//
// Exactness. A row is computed by itself, 64 columns at a time, with the same operations in every
// batch. Sums over a row have 64 lanes in every instruction set, halved in one order.
#pragma once

#include "rowwise_activation.inl.h"
#include "rowwise_group.inl.h"
#include "rowwise_kernel.h"
#include "rowwise_norm.inl.h"

namespace octavo {
namespace {

// Groups that are computed before they are quantised. One at a time would wait: for its largest
// magnitude, then for a division, and only few fit in the CPU's window.
constexpr int64_t kGroupsAtOnce = 8;

// Computes a row: group(width, column, count) is 64 columns of it.
template <class V, class Compute>
inline void put_floats(const RowOutput& output, int64_t row, int64_t depth, const Compute& group) {
  for_each_group(depth, [&](auto width, int64_t column, int count) {
    store<V, decltype(width)::kFull>(output.values + row * depth + column,
                                     group(width, column, count), count);
  });
}

// The same, quantised.
template <class V, class Compute>
inline void put_integers(const RowOutput& output, int64_t row, int64_t depth,
                         const Compute& group) {
  alignas(64) float ready[kGroupsAtOnce * kGroupColumns];
  for (int64_t first = 0; first < depth; first += kGroupsAtOnce * kGroupColumns) {
    const int64_t columns = smaller(depth - first, kGroupsAtOnce * kGroupColumns);
    for_each_group(columns, [&](auto width, int64_t column, int count) {
      constexpr bool kFull = decltype(width)::kFull;
      const Group<V> x = keep_first<V, kFull>(group(width, first + column, count), count);
      store<V, true>(ready + column, x, kGroupColumns);
    });
    for (int64_t column = 0; column < columns; column += kGroupColumns)
      put_quantized<V>(output, row, depth, first + column,
                       load<V, true>(ready + column, kGroupColumns));
  }
}

template <class V, bool kQuantized, class Compute>
inline void put_row(const RowOutput& output, int64_t row, int64_t depth, const Compute& group) {
  if constexpr (kQuantized)
    put_integers<V>(output, row, depth, group);
  else
    put_floats<V>(output, row, depth, group);
}

template <class V>
void quantize(const QuantizeProblem& p, RowRange rows) {
  for (int64_t row = rows.first; row < rows.last; ++row)
    for_each_group(p.depth, [&](auto width, int64_t column, int count) {
      const float* from = p.input + row * p.depth + column;
      put_quantized<V>(p.output, row, p.depth, column,
                       load<V, decltype(width)::kFull>(from, count));
    });
}

template <class V, bool kQuantized>
void norm_rows(const NormProblem& p, RowRange rows) {
  for (int64_t row = rows.first; row < rows.last; ++row) {
    const float* x = residual_stream<V>(p, row);
    const RowScale scale = row_scale<V>(p, x);
    put_row<V, kQuantized>(p.output, row, p.depth, [&](auto width, int64_t column, int count) {
      return normed<V, decltype(width)::kFull>(p, x, scale, column, count);
    });
  }
}

template <class V>
void norm(const NormProblem& p, RowRange rows) {
  if (p.output.values == nullptr)
    norm_rows<V, true>(p, rows);
  else
    norm_rows<V, false>(p, rows);
}

template <class V, ActivationFunction kFunction, bool kQuantized>
void activate_rows(const ActivateProblem& p, RowRange rows) {
  const int64_t width = p.gated ? 2 * p.depth : p.depth;
  for (int64_t row = rows.first; row < rows.last; ++row) {
    const float* input = p.input + row * width;
    put_row<V, kQuantized>(p.output, row, p.depth, [&](auto width, int64_t column, int count) {
      constexpr bool kFull = decltype(width)::kFull;
      Group<V> x = load<V, kFull>(input + column, count);
      OCTAVO_UNROLL
      for (int i = 0; i < Group<V>::kRegisters; ++i)
        x.part[i] = activated<V, kFunction>(x.part[i]);
      if (p.gated) {
        const Group<V> factor = load<V, kFull>(input + p.depth + column, count);
        OCTAVO_UNROLL
        for (int i = 0; i < Group<V>::kRegisters; ++i)
          x.part[i] = V::mul(x.part[i], factor.part[i]);
      }
      return x;
    });
  }
}

template <class V, ActivationFunction kFunction>
void activate_with(const ActivateProblem& p, RowRange rows) {
  if (p.output.values == nullptr)
    activate_rows<V, kFunction, true>(p, rows);
  else
    activate_rows<V, kFunction, false>(p, rows);
}

template <class V>
void activate(const ActivateProblem& p, RowRange rows) {
  using F = ActivationFunction;
  switch (p.function) {
    case F::kSilu: return activate_with<V, F::kSilu>(p, rows);
    case F::kGelu: return activate_with<V, F::kGelu>(p, rows);
    case F::kGeluTanh: return activate_with<V, F::kGeluTanh>(p, rows);
    case F::kRelu: return activate_with<V, F::kRelu>(p, rows);
    case F::kReluSquared: return activate_with<V, F::kReluSquared>(p, rows);
  }
}

template <class V>
constexpr RowwiseKernel kRowwise{quantize<V>, norm<V>, activate<V>};

}  // namespace
}  // namespace octavo
