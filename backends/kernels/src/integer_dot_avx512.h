// Dot products of bytes in 64-byte registers, with AVX512-VNNI or without. See
// integer_dot_portable.h for what each function means.
#pragma once

#include <stdint.h>

#include "simd_avx512.h"

namespace octavo {
namespace {

struct Avx512Integers : Avx512 {
  using Int = __m512i;
  using Bytes = __m512i;
  using Activations = __m512i;

  static Int set1_int(int32_t x) { return _mm512_set1_epi32(x); }
  static Vec to_float(Int x) { return _mm512_cvtepi32_ps(x); }
  static Vec load_halves(const uint16_t* halves) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves)));
  }
  static Bytes load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
  static Activations broadcast(const int8_t* four) {
    int32_t bits;
    __builtin_memcpy(&bits, four, sizeof(bits));
    return _mm512_set1_epi32(bits);
  }
  static Bytes low_nibbles(Bytes x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
  static Bytes high_nibbles(Bytes x) { return low_nibbles(_mm512_srli_epi16(x, 4)); }
};

// Without VNNI: exact for the reason that integer_dot_avx2.h gives.
struct Avx512Pairs : Avx512Integers {
  template <bool kNibbles>
  struct Dot;
};

template <>
struct Avx512Pairs::Dot<true> {
  static constexpr int kRows = 4;
  static constexpr int kRegisters = 2;
  using Weights = Bytes;
  using Sum = Int;
  static Weights weights(Bytes bytes) { return bytes; }
  static void begin(Sum& sum, Int) { sum = _mm512_setzero_si512(); }
  static void add(Sum& sum, Weights weights, Activations activations) {
    sum = _mm512_adds_epi16(sum, _mm512_maddubs_epi16(weights, activations));
  }
  static void end(Sum sum, Int& total) {
    total = _mm512_add_epi32(total, _mm512_madd_epi16(sum, _mm512_set1_epi16(1)));
  }
};

template <>
struct Avx512Pairs::Dot<false> {
  static constexpr int kRows = 3;
  static constexpr int kRegisters = 2;
  struct Weights {
    Bytes low, high;
  };
  struct Sum {
    Int low, high;
  };
  static Weights weights(Bytes bytes) { return {low_nibbles(bytes), high_nibbles(bytes)}; }
  static void begin(Sum& sum, Int) { sum.low = sum.high = _mm512_setzero_si512(); }
  static void add(Sum& sum, const Weights& weights, Activations activations) {
    sum.low = _mm512_adds_epi16(sum.low, _mm512_maddubs_epi16(weights.low, activations));
    sum.high = _mm512_adds_epi16(sum.high, _mm512_maddubs_epi16(weights.high, activations));
  }
  static void end(const Sum& sum, Int& total) {
    total = _mm512_add_epi32(total, _mm512_madd_epi16(sum.low, _mm512_set1_epi16(1)));
    total = _mm512_add_epi32(total, _mm512_madd_epi16(sum.high, _mm512_set1_epi16(16)));
  }
};

#if defined(__AVX512VNNI__)
struct Avx512Vnni : Avx512Integers {
  template <bool kNibbles>
  struct Dot {
    static constexpr int kRows = 6;
    static constexpr int kRegisters = 2;
    using Weights = Bytes;
    using Sum = Int;
    static Weights weights(Bytes bytes) { return bytes; }
    static void begin(Sum& sum, Int total) { sum = total; }
    static void add(Sum& sum, Weights weights, Activations activations) {
      sum = _mm512_dpbusd_epi32(sum, weights, activations);
    }
    static void end(Sum sum, Int& total) { total = sum; }
  };
};
#endif

}  // namespace
}  // namespace octavo
