// Powers of two, shared by the arithmetic of the kernels that need an exponential.
#pragma once

namespace octavo {
namespace {

constexpr float kLog2E = 1.44269504088896341f;

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

}  // namespace
}  // namespace octavo
