// 64 columns of a row in registers: how they are read, written and quantised. Internal to
// rowwise_kernel.inl.h, whose rules hold here too.
#pragma once

#include "kernel_arithmetic.h"
#include "rowwise_kernel.h"

namespace octavo {
namespace {

constexpr int kGroupColumns = 64;

template <class V>
struct Group {
  static constexpr int kRegisters = kGroupColumns / V::kLanes;
  typename V::Vec part[kRegisters];
};

template <bool kIsFull>
struct Width {
  static constexpr bool kFull = kIsFull;
};

// Calls body(width, column, count) for each group of a row: the last one may have fewer columns
// than 64, and `width` says at compile time whether this one does.
template <class Body>
inline void for_each_group(int64_t depth, const Body& body) {
  int64_t column = 0;
  for (; column + kGroupColumns <= depth; column += kGroupColumns) body(Width<true>{}, column, kGroupColumns);
  if (column < depth) body(Width<false>{}, column, static_cast<int>(depth - column));
}

// The first `count` columns and zeros.
template <class V, bool kFull>
inline Group<V> load(const float* from, int count) {
  Group<V> x;
  OCTAVO_UNROLL
  for (int i = 0; i < Group<V>::kRegisters; ++i) {
    const int first = i * V::kLanes, left = count - first;
    if (kFull || left >= V::kLanes)
      x.part[i] = V::load(from + first);
    else
      x.part[i] = left > 0 ? V::load_first(from + first, left) : V::set1(0.0f);
  }
  return x;
}

template <class V, bool kFull>
inline void store(float* to, const Group<V>& x, int count) {
  OCTAVO_UNROLL
  for (int i = 0; i < Group<V>::kRegisters; ++i) {
    const int first = i * V::kLanes, left = count - first;
    if (kFull || left >= V::kLanes)
      V::store(to + first, x.part[i]);
    else if (left > 0)
      V::store_first(to + first, x.part[i], left);
  }
}

template <class V>
inline Group<V> zeros() {
  Group<V> x;
  OCTAVO_UNROLL
  for (int i = 0; i < Group<V>::kRegisters; ++i) x.part[i] = V::set1(0.0f);
  return x;
}

// Zeros from column `count` on.
template <class V, bool kFull>
inline Group<V> keep_first(Group<V> x, int count) {
  if constexpr (!kFull) {
    const auto end = V::set1(static_cast<float>(count));
    OCTAVO_UNROLL
    for (int i = 0; i < Group<V>::kRegisters; ++i) {
      const auto column = V::add(V::iota(), V::set1(static_cast<float>(i * V::kLanes)));
      x.part[i] = V::select(V::less(column, end), x.part[i], V::set1(0.0f));
    }
  }
  return x;
}

// The upper half of 64 lanes is added to the lower half until one is left, in every set.
template <class V>
inline float reduce_add(Group<V> x) {
  OCTAVO_UNROLL
  for (int half = Group<V>::kRegisters / 2; half > 0; half /= 2)
    OCTAVO_UNROLL
    for (int i = 0; i < half; ++i) x.part[i] = V::add(x.part[i], x.part[i + half]);
  return V::reduce_add(x.part[0]);
}

template <class V>
inline void put_quantized_part(const RowOutput& output, int64_t at, const typename V::Vec* x) {
  constexpr float kLargestFloat = 3.402823466e+38f;
  const float largest = Int8<V>::largest_magnitude(x);
  output.scales[at] = largest / 127.0f;
  // A NaN leaves zeros and a scale of NaN, infinity a scale of infinity: both stay visible.
  const float factor = largest > 0.0f ? 127.0f / largest : 0.0f;
  int8_t* to = output.quantized + at * kQuantizationGroup;
  // Of finite values times a finite factor none leaves the range and none is NaN.
  const bool finite = largest <= kLargestFloat && factor <= kLargestFloat;
  output.sums[at] = finite ? Int8<V>::template store<false>(x, factor, to)
                           : Int8<V>::template store<true>(x, factor, to);
}

// Quantises the 64 columns from `column` on of a row of `depth`; those behind its end are zero.
template <class V>
inline void put_quantized(const RowOutput& output, int64_t row, int64_t depth, int64_t column,
                          const Group<V>& x) {
  const int64_t groups = (depth + kQuantizationGroup - 1) / kQuantizationGroup;
  const int64_t at = row * groups + column / kQuantizationGroup;
  put_quantized_part<V>(output, at, x.part);
  if (column + kQuantizationGroup < depth)
    put_quantized_part<V>(output, at + 1, x.part + Group<V>::kRegisters / 2);
}

}  // namespace
}  // namespace octavo
