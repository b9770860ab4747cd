// Small functions that the parts of the attention kernel share. Internal to
// paged_attention_kernel.inl.h, whose rules on includes hold here too. Scores are kept in units of
// log2, which turns the exponentials into powers of two.
#pragma once

#include "kernel_arithmetic.h"
#include "kernel_exp2.h"
#include "paged_attention_kernel.h"

namespace octavo {
namespace {

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

template <class V>
inline float exp2_scalar(float x) {
  return V::first(exp2<V>(V::set1(x)));
}

}  // namespace
}  // namespace octavo
