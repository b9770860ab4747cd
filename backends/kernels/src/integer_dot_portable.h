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

// Integers are held as floats, which are exact below 2^24: a group's sum stays below 2^22.
template <int Lanes, int Rows, int Registers>
struct PortableIntegers : Portable<Lanes, Rows, Rows * Registers> {
  using Floats = Portable<Lanes, Rows, Rows * Registers>;
  using Vec = typename Floats::Vec;
  using Int = Vec;
  using Bytes = typename VectorOf<Lanes>::Ints;  // four a lane

  static Int set1_int(int32_t x) { return Floats::set1(static_cast<float>(x)); }
  static Vec to_float(Int x) { return x; }
  static Vec load_halves(const uint16_t* halves) {
    Vec x{};
    for (int i = 0; i < Lanes; ++i) x[i] = half_to_float(halves[i]);
    return x;
  }
  static Bytes load_bytes(const uint8_t* p) {
    Bytes x;
    __builtin_memcpy(&x, p, sizeof(x));
    return x;
  }
  static Bytes low_nibbles(Bytes x) { return x & 0x0f0f0f0f; }
  static Bytes high_nibbles(Bytes x) { return low_nibbles(x >> 4); }

  // The same four activations for every lane.
  struct Activations {
    float value[4];
  };
  static Activations broadcast(const int8_t* p) {
    return {{static_cast<float>(p[0]), static_cast<float>(p[1]), static_cast<float>(p[2]),
             static_cast<float>(p[3])}};
  }

  // Sums of up to 8 dot products of four bytes a lane; `kNibbles` promises weights below 16.
  template <bool kNibbles>
  struct Dot {
    static constexpr int kRows = Rows;  // of a tile
    static constexpr int kRegisters = Registers;
    struct Weights {
      Vec value[4];
    };
    using Sum = Int;
    static Weights weights(Bytes bytes) {
      Weights w;
      for (int k = 0; k < 4; ++k)
        w.value[k] = __builtin_convertvector(bytes >> 8 * k & 0xff, Vec);
      return w;
    }
    // What is summed between the two is added to the total, by one or the other.
    static void begin(Sum& sum, Int total) { sum = total; }
    static void add(Sum& sum, const Weights& w, const Activations& activations) {
      for (int k = 0; k < 4; ++k) sum += w.value[k] * activations.value[k];
    }
    static void end(Sum sum, Int& total) { total = sum; }
  };
};

}  // namespace
}  // namespace octavo
