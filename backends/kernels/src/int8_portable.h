// Floats to signed 8-bit integers, in the compiler's own vector types. This file says what each
// function means; int8_avx2.h and int8_avx512.h do the same with their instructions.
#pragma once

#include <stdint.h>

#include "simd_portable.h"

namespace octavo {
namespace {

template <class V>
struct Int8 {
  static constexpr int kRegisters = 32 / V::kLanes;
  using Vec = typename V::Vec;
  using Ints = typename V::Mask;

  // The largest of 32 magnitudes. Their representations are compared, and NaN's is above all, so
  // a NaN is not lost.
  static float largest_magnitude(const Vec* x) {
    Ints largest{};
    for (int i = 0; i < kRegisters; ++i) {
      const Ints magnitude = as<Ints>(x[i]) & 0x7fffffff;
      largest = magnitude > largest ? magnitude : largest;
    }
    int bits = 0;
    for (int i = 0; i < V::kLanes; ++i) bits = largest[i] > bits ? largest[i] : bits;
    return as<float>(bits);
  }

  // Writes 32 integers, round(x * factor), halves to even, and returns their sum. Where `kCareful`,
  // they are kept within -127..127 and a NaN becomes 0; else x * factor has to be within.
  template <bool kCareful>
  static int32_t store(const Vec* x, float factor, int8_t* to) {
    // Added to a small number, 1.5 * 2^23 leaves its integer in the low bits, rounded to even.
    const Vec shift = V::set1(12582912.0f);
    [[maybe_unused]] const Vec most = V::set1(127.0f), least = V::set1(-127.0f);
    int32_t sum = 0;
    for (int i = 0; i < kRegisters; ++i) {
      Vec y = x[i] * factor;
      if constexpr (kCareful) {
        y = y < least ? least : y > most ? most : y;
        y = y == y ? y : Vec{};
      }
      const Ints integers = as<Ints>(y + shift) - as<Ints>(shift);
      for (int lane = 0; lane < V::kLanes; ++lane) {
        to[i * V::kLanes + lane] = static_cast<int8_t>(integers[lane]);
        sum += integers[lane];
      }
    }
    return sum;
  }

 private:
  template <class To, class From>
  static To as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    __builtin_memcpy(&to, &from, sizeof(to));
    return to;
  }
};

}  // namespace
}  // namespace octavo
