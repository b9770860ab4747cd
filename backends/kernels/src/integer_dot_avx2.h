// Dot products of bytes in 32-byte registers, with AVX-VNNI or without. See integer_dot_portable.h
// for what each function means.
#pragma once

#include <stdint.h>

#include "simd_avx2.h"

namespace octavo {
namespace {

struct Avx2Integers : Avx2 {
  using Int = __m256i;
  using Bytes = __m256i;

  static Int set1_int(int32_t x) { return _mm256_set1_epi32(x); }
  static Vec to_float(Int x) { return _mm256_cvtepi32_ps(x); }
  static Vec load_scale(const float* p) { return load(p); }
  static Vec load_scale(const uint16_t* halves) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves)));
  }
  static Bytes load_bytes(const uint8_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static void store_bytes(uint8_t* p, Bytes x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x);
  }
  static Bytes broadcast(const int8_t* four) {
    int32_t bits;
    __builtin_memcpy(&bits, four, sizeof(bits));
    return _mm256_set1_epi32(bits);
  }
  static Bytes low_nibbles(Bytes x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
  static Bytes high_nibbles(Bytes x) { return low_nibbles(_mm256_srli_epi16(x, 4)); }
};

// Without VNNI: vpmaddubsw adds two products in 16 bits and saturates, as 255 * 127 * 2 would. The
// halves of a byte are therefore multiplied apart: two products are at most 2 * 15 * 128 = 3840 in
// magnitude and eight such sums 30720, below 2^15, so 16 bits hold the sum of 8 steps exactly.
struct Avx2Pairs : Avx2Integers {
  static constexpr int kRows = 2;
  static constexpr int kRegisters = 2;

  template <bool kNibbles>
  struct Dot;
};

template <>
struct Avx2Pairs::Dot<true> {
  using Weights = Bytes;
  using Sum = Int;
  static Weights weights(Bytes bytes) { return bytes; }
  static Sum begin(Int) { return _mm256_setzero_si256(); }
  static Sum add(Sum sum, Weights weights, Bytes activations) {
    return _mm256_add_epi16(sum, _mm256_maddubs_epi16(weights, activations));
  }
  static Int end(Sum sum, Int start) {
    return _mm256_add_epi32(start, _mm256_madd_epi16(sum, _mm256_set1_epi16(1)));
  }
};

template <>
struct Avx2Pairs::Dot<false> {
  struct Weights {
    Bytes low, high;
  };
  struct Sum {
    Int low, high;
  };
  static Weights weights(Bytes bytes) { return {low_nibbles(bytes), high_nibbles(bytes)}; }
  static Sum begin(Int) { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  static Sum add(Sum sum, Weights weights, Bytes activations) {
    return {_mm256_add_epi16(sum.low, _mm256_maddubs_epi16(weights.low, activations)),
            _mm256_add_epi16(sum.high, _mm256_maddubs_epi16(weights.high, activations))};
  }
  static Int end(Sum sum, Int start) {
    const Int high = _mm256_madd_epi16(sum.high, _mm256_set1_epi16(16));
    return _mm256_add_epi32(Dot<true>::end(sum.low, start), high);
  }
};

#if defined(__AVXVNNI__)
struct Avx2Vnni : Avx2Integers {
  static constexpr int kRows = 3;
  static constexpr int kRegisters = 4;

  template <bool kNibbles>
  struct Dot {
    using Weights = Bytes;
    using Sum = Int;
    static Weights weights(Bytes bytes) { return bytes; }
    static Sum begin(Int start) { return start; }
    static Sum add(Sum sum, Weights weights, Bytes activations) {
      return _mm256_dpbusd_avx_epi32(sum, weights, activations);
    }
    static Int end(Sum sum, Int) { return sum; }
  };
};
#endif

}  // namespace
}  // namespace octavo
