// Dot products of unsigned and signed bytes on top of the portable floats: any CPU, no intrinsics.
// This file says what each function means; the other integer_dot_*.h do the same with their
// instructions. All are exact, so they agree bit for bit.
#pragma once

#include <stdint.h>

#include "simd_portable.h"

namespace octavo {
namespace {

// The value of an IEEE half, worked out in integers: a session may flush subnormal floats to zero.
inline float half_to_float(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16, exponent = half >> 10 & 31u, digits = half & 0x3ffu;
  uint32_t bits = sign;
  if (exponent == 31) {
    bits |= 0x7f800000u | digits << 13;
  } else if (exponent > 0) {
    bits |= (exponent + 112) << 23 | digits << 13;
  } else if (digits > 0) {
    const float magnitude = static_cast<float>(digits) * 0x1p-24f;
    __builtin_memcpy(&bits, &magnitude, sizeof(bits));
    bits |= sign;
  }
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

template <int Lanes, int Rows, int Registers>
struct PortableIntegers : Portable<Lanes, Rows, Rows * Registers> {
  static constexpr int kRegisters = Registers;  // of a tile's width

  using Vec = typename Portable<Lanes, Rows, Rows * Registers>::Vec;
  using Int = typename VectorOf<Lanes>::Ints;
  struct Bytes {  // four a lane, signed or unsigned
    uint8_t byte[4 * Lanes];
  };

  static Int set1_int(int32_t x) { return x - Int{}; }
  static Vec to_float(Int x) { return __builtin_convertvector(x, Vec); }
  static Vec load_scale(const float* p) { return Portable<Lanes, Rows, Rows * Registers>::load(p); }
  static Vec load_scale(const uint16_t* halves) {
    Vec x{};
    for (int i = 0; i < Lanes; ++i) x[i] = half_to_float(halves[i]);
    return x;
  }
  static Bytes load_bytes(const uint8_t* p) {
    Bytes x;
    __builtin_memcpy(&x, p, sizeof(x));
    return x;
  }
  static void store_bytes(uint8_t* p, Bytes x) { __builtin_memcpy(p, &x, sizeof(x)); }
  // The same four bytes in every lane.
  static Bytes broadcast(const int8_t* four) {
    Bytes x;
    for (int i = 0; i < Lanes; ++i) __builtin_memcpy(x.byte + 4 * i, four, 4);
    return x;
  }
  static Bytes low_nibbles(Bytes x) {
    for (uint8_t& byte : x.byte) byte &= 15;
    return x;
  }
  static Bytes high_nibbles(Bytes x) {
    for (uint8_t& byte : x.byte) byte >>= 4;
    return x;
  }

  // Sums of up to 8 products of four bytes a lane; `kNibbles` promises weights below 16.
  template <bool kNibbles>
  struct Dot {
    using Weights = Bytes;
    using Sum = Int;
    static Weights weights(Bytes bytes) { return bytes; }
    static Sum begin(Int start) { return start; }
    static Sum add(Sum sum, const Weights& weights, const Bytes& activations) {
      for (int i = 0; i < Lanes; ++i)
        for (int k = 0; k < 4; ++k)
          sum[i] += weights.byte[4 * i + k] * static_cast<int8_t>(activations.byte[4 * i + k]);
      return sum;
    }
    static Int end(Sum sum, Int) { return sum; }
  };
};

}  // namespace
}  // namespace octavo
