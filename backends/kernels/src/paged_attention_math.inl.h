// Small functions that the parts of the attention kernel share. Internal to
// paged_attention_kernel.inl.h, whose rules on includes hold here too.
#pragma once

#include "kernel_arithmetic.h"
#include "paged_attention_kernel.h"

namespace octavo {
namespace {

// Scores are kept in units of log2, which turns the exponentials into powers of two.
constexpr float kLog2E = 1.44269504088896341f;
constexpr float kNoMaximum = -3.402823466e+38f;  // of a row that has seen no key
constexpr float kMinusInfinity = -__builtin_inff();
constexpr int kGroupsPerSubBlock = kSubBlock / kKeyGroup;

inline int64_t round_up(int64_t x, int64_t multiple) {
  return (x + multiple - 1) / multiple * multiple;
}

// The largest power of two of registers that lets `rows` rows stay within the accumulators.
template <class V>
constexpr int registers_per_row(int rows, int limit) {
  int registers = 1;
  while (2 * registers * rows <= V::kAccumulators && 2 * registers <= limit) registers *= 2;
  return registers;
}

// 2^x for x <= 0, to about one unit in the last place; 0 below 2^-126.5; NaN stays NaN.
template <class V>
inline typename V::Vec exp2(typename V::Vec x) {
  using Vec = typename V::Vec;
  // Adding 1.5 * 2^23 rounds to an integer in the low bits; 127 more makes them the exponent
  // field, in which -127 stands for the number 0.
  const Vec shift = V::set1(12582912.0f + 127.0f);
  const Vec clamped = V::max(V::set1(-127.0f), x);
  const Vec shifted = V::add(clamped, shift);
  const Vec fraction = V::sub(clamped, V::sub(shifted, shift));
  // Minimax polynomial on [-1/2, 1/2] with value 1 at 0; relative error 1.1e-7.
  Vec power = V::set1(1.326472731e-03f);
  power = V::fma(power, fraction, V::set1(9.671512991e-03f));
  power = V::fma(power, fraction, V::set1(5.550733581e-02f));
  power = V::fma(power, fraction, V::set1(2.402224243e-01f));
  power = V::fma(power, fraction, V::set1(6.931470037e-01f));
  power = V::fma(power, fraction, V::set1(1.0f));
  return V::mul(power, V::bits_to_exponent(shifted));
}

template <class V>
inline float exp2_scalar(float x) {
  return V::first(exp2<V>(V::set1(x)));
}

}  // namespace
}  // namespace octavo
