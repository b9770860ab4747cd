// RMS and layer norm. Internal to rowwise_kernel.inl.h, whose rules hold here too.
#pragma once

#include "rowwise_group.inl.h"
#include "rowwise_kernel.h"

namespace octavo {
namespace {

// What a row is multiplied by after its mean is subtracted.
struct RowScale {
  float mean;
  float inverse;
};

// input + residual of a row: adds them where there is a residual.
template <class V>
inline const float* residual_stream(const NormProblem& p, int64_t row) {
  const float* input = p.input + row * p.depth;
  if (p.residual == nullptr) return input;
  const float* residual = p.residual + row * p.depth;
  float* sum = p.sum + row * p.depth;
  for_each_group(p.depth, [&](auto width, int64_t column, int count) {
    constexpr bool kFull = decltype(width)::kFull;
    Group<V> x = load<V, kFull>(input + column, count);
    const Group<V> y = load<V, kFull>(residual + column, count);
    OCTAVO_UNROLL
    for (int i = 0; i < Group<V>::kRegisters; ++i) x.part[i] = V::add(x.part[i], y.part[i]);
    store<V, kFull>(sum + column, x, count);
  });
  return sum;
}

template <class V>
inline float mean_of(const float* x, int64_t depth) {
  Group<V> sums = zeros<V>();
  for_each_group(depth, [&](auto width, int64_t column, int count) {
    const Group<V> y = load<V, decltype(width)::kFull>(x + column, count);
    OCTAVO_UNROLL
    for (int i = 0; i < Group<V>::kRegisters; ++i) sums.part[i] = V::add(sums.part[i], y.part[i]);
  });
  return reduce_add<V>(sums) / static_cast<float>(depth);
}

template <class V>
inline float mean_square_of(const float* x, int64_t depth, float mean) {
  Group<V> sums = zeros<V>();
  for_each_group(depth, [&](auto width, int64_t column, int count) {
    constexpr bool kFull = decltype(width)::kFull;
    Group<V> y = load<V, kFull>(x + column, count);
    OCTAVO_UNROLL
    for (int i = 0; i < Group<V>::kRegisters; ++i)
      y.part[i] = V::sub(y.part[i], V::set1(mean));
    y = keep_first<V, kFull>(y, count);
    OCTAVO_UNROLL
    for (int i = 0; i < Group<V>::kRegisters; ++i)
      sums.part[i] = V::fma(y.part[i], y.part[i], sums.part[i]);
  });
  return reduce_add<V>(sums) / static_cast<float>(depth);
}

template <class V>
inline RowScale row_scale(const NormProblem& p, const float* x) {
  const float mean = p.centered ? mean_of<V>(x, p.depth) : 0.0f;
  const float mean_square = mean_square_of<V>(x, p.depth, mean);
  return {mean, 1.0f / __builtin_sqrtf(mean_square + p.epsilon)};
}

// (x - mean) * inverse * weight + bias.
template <class V, bool kFull>
inline Group<V> normed(const NormProblem& p, const float* x, RowScale scale, int64_t column,
                       int count) {
  Group<V> y = load<V, kFull>(x + column, count);
  OCTAVO_UNROLL
  for (int i = 0; i < Group<V>::kRegisters; ++i)
    y.part[i] = V::mul(V::sub(y.part[i], V::set1(scale.mean)), V::set1(scale.inverse));
  if (p.weight != nullptr) {
    const Group<V> weight = load<V, kFull>(p.weight + column, count);
    OCTAVO_UNROLL
    for (int i = 0; i < Group<V>::kRegisters; ++i) y.part[i] = V::mul(y.part[i], weight.part[i]);
  }
  if (p.bias != nullptr) {
    const Group<V> bias = load<V, kFull>(p.bias + column, count);
    OCTAVO_UNROLL
    for (int i = 0; i < Group<V>::kRegisters; ++i) y.part[i] = V::add(y.part[i], bias.part[i]);
  }
  return y;
}

}  // namespace
}  // namespace octavo
