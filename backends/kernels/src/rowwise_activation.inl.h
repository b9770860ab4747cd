// Activation functions. Internal to rowwise_kernel.inl.h, whose rules hold here too.
#pragma once

#include "kernel_exp2.h"
#include "rowwise_kernel.h"

namespace octavo {
namespace {

// factor * sigmoid(x), from e^-|x|, which does not overflow: 1 / (1 + z) or z / (1 + z).
template <class V>
inline typename V::Vec times_sigmoid(typename V::Vec factor, typename V::Vec x) {
  const auto one = V::set1(1.0f);
  const auto z = exp2<V>(V::mul(V::abs(x), V::set1(-kLog2E)));
  const auto numerator = V::select(V::less(x, V::set1(0.0f)), z, one);
  return V::mul(factor, V::div(numerator, V::add(one, z)));
}

// x * Q(-x) = max(x, 0) - |x| * Q(|x|), where Q is the normal distribution's upper tail. log2(Q) is
// smooth, so a polynomial gives it: minimax on [0, 8] of degree 8 for the error of |x| * Q, by
// Lawson's reweighted least squares, 1.8e-8; with all rounding GELU is within 2.5e-7 of exact. The
// polynomial keeps falling behind 8 and is below -126.5, where exp2 gives 0, long before 16.
template <class V>
inline typename V::Vec gelu(typename V::Vec x) {
  const auto limit = V::set1(16.0f), magnitude = V::abs(x);
  // A NaN is not less and becomes 16; it comes back with the maximum below.
  const auto a = V::select(V::less(magnitude, limit), magnitude, limit);
  auto log2_tail = V::set1(-7.267218507e-07f);
  log2_tail = V::fma(log2_tail, a, V::set1(1.249926027e-05f));
  log2_tail = V::fma(log2_tail, a, V::set1(-4.836474909e-05f));
  log2_tail = V::fma(log2_tail, a, V::set1(-5.036580260e-04f));
  log2_tail = V::fma(log2_tail, a, V::set1(7.608580403e-03f));
  log2_tail = V::fma(log2_tail, a, V::set1(-5.294979736e-02f));
  log2_tail = V::fma(log2_tail, a, V::set1(-4.590082467e-01f));
  log2_tail = V::fma(log2_tail, a, V::set1(-1.151145816e+00f));
  log2_tail = V::fma(log2_tail, a, V::set1(-9.999973178e-01f));
  const auto tail = V::mul(a, exp2<V>(log2_tail));
  return V::sub(V::max(V::set1(0.0f), x), tail);
}

// x / 2 * (1 + tanh(u)) = x * sigmoid(2 u), which keeps the small values of negative x.
template <class V>
inline typename V::Vec gelu_tanh(typename V::Vec x) {
  constexpr float kTwiceRoot = 1.5957691216057308f;  // 2 * sqrt(2 / pi)
  const auto factor =
      V::fma(V::mul(x, x), V::set1(0.044715f * kTwiceRoot), V::set1(kTwiceRoot));
  return times_sigmoid<V>(x, V::mul(x, factor));
}

template <class V, ActivationFunction kFunction>
inline typename V::Vec activated(typename V::Vec x) {
  if constexpr (kFunction == ActivationFunction::kSilu) return times_sigmoid<V>(x, x);
  if constexpr (kFunction == ActivationFunction::kGelu) return gelu<V>(x);
  if constexpr (kFunction == ActivationFunction::kGeluTanh) return gelu_tanh<V>(x);
  // The maximum is its second operand where one is NaN.
  const auto positive = V::max(V::set1(0.0f), x);
  if constexpr (kFunction == ActivationFunction::kReluSquared) return V::mul(positive, positive);
  return positive;
}

}  // namespace
}  // namespace octavo
