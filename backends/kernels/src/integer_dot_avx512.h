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

  static Int set1_int(int32_t x) { return _mm512_set1_epi32(x); }
  static Vec to_float(Int x) { return _mm512_cvtepi32_ps(x); }
  static Vec load_scale(const float* p) { return load(p); }
  static Vec load_scale(const uint16_t* halves) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves)));
  }
  static Bytes load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
  static void store_bytes(uint8_t* p, Bytes x) { _mm512_storeu_si512(p, x); }
  static Bytes broadcast(const int8_t* four) {
    int32_t bits;
    __builtin_memcpy(&bits, four, sizeof(bits));
    return _mm512_set1_epi32(bits);
  }
  static Bytes low_nibbles(Bytes x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
  static Bytes high_nibbles(Bytes x) { return low_nibbles(_mm512_srli_epi16(x, 4)); }
};

// Without VNNI: exact for the reason that integer_dot_avx2.h gives.
struct Avx512Pairs : Avx512Integers {
  static constexpr int kRows = 4;
  static constexpr int kRegisters = 2;

  template <bool kNibbles>
  struct Dot;
};

template <>
struct Avx512Pairs::Dot<true> {
  using Weights = Bytes;
  using Sum = Int;
  static Weights weights(Bytes bytes) { return bytes; }
  static Sum begin(Int) { return _mm512_setzero_si512(); }
  static Sum add(Sum sum, Weights weights, Bytes activations) {
    return _mm512_add_epi16(sum, _mm512_maddubs_epi16(weights, activations));
  }
  static Int end(Sum sum, Int start) {
    return _mm512_add_epi32(start, _mm512_madd_epi16(sum, _mm512_set1_epi16(1)));
  }
};

template <>
struct Avx512Pairs::Dot<false> {
  struct Weights {
    Bytes low, high;
  };
  struct Sum {
    Int low, high;
  };
  static Weights weights(Bytes bytes) { return {low_nibbles(bytes), high_nibbles(bytes)}; }
  static Sum begin(Int) { return {_mm512_setzero_si512(), _mm512_setzero_si512()}; }
  static Sum add(Sum sum, Weights weights, Bytes activations) {
    return {_mm512_add_epi16(sum.low, _mm512_maddubs_epi16(weights.low, activations)),
            _mm512_add_epi16(sum.high, _mm512_maddubs_epi16(weights.high, activations))};
  }
  static Int end(Sum sum, Int start) {
    const Int high = _mm512_madd_epi16(sum.high, _mm512_set1_epi16(16));
    return _mm512_add_epi32(Dot<true>::end(sum.low, start), high);
  }
};

#if defined(__AVX512VNNI__)
struct Avx512Vnni : Avx512Integers {
  static constexpr int kRows = 3;
  static constexpr int kRegisters = 4;

  template <bool kNibbles>
  struct Dot {
    using Weights = Bytes;
    using Sum = Int;
    static Weights weights(Bytes bytes) { return bytes; }
    static Sum begin(Int start) { return start; }
    static Sum add(Sum sum, Weights weights, Bytes activations) {
      return _mm512_dpbusd_epi32(sum, weights, activations);
    }
    static Int end(Sum sum, Int) { return sum; }
  };
};
#endif

}  // namespace
}  // namespace octavo
