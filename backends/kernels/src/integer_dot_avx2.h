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
  using Activations = __m256i;

  static Int set1_int(int32_t x) { return _mm256_set1_epi32(x); }
  static Vec to_float(Int x) { return _mm256_cvtepi32_ps(x); }
  static Vec load_halves(const uint16_t* halves) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves)));
  }
  static Bytes load_bytes(const uint8_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static Activations broadcast(const int8_t* four) {
    int32_t bits;
    __builtin_memcpy(&bits, four, sizeof(bits));
    return _mm256_set1_epi32(bits);
  }
  static Bytes low_nibbles(Bytes x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
  static Bytes high_nibbles(Bytes x) { return low_nibbles(_mm256_srli_epi16(x, 4)); }
};

// Without VNNI: vpmaddubsw adds two products in 16 bits and saturates, as 255 * 127 * 2 would. The
// halves of a byte are therefore multiplied apart: two products are at most 2 * 15 * 128 = 3840 in
// magnitude and eight such sums 30720, below 2^15, so 16 bits hold the sum of 8 steps exactly. They
// are added by the saturating instruction, which costs the same: GCC rearranges plain vector sums
// until they no longer fit in registers.
struct Avx2Pairs : Avx2Integers {
  template <bool kNibbles>
  struct Dot;
};

template <>
struct Avx2Pairs::Dot<true> {
  static constexpr int kRows = 2;
  static constexpr int kRegisters = 4;
  using Weights = Bytes;
  using Sum = Int;
  static Weights weights(Bytes bytes) { return bytes; }
  static void begin(Sum& sum, Int) { sum = _mm256_setzero_si256(); }
  static void add(Sum& sum, Weights weights, Activations activations) {
    sum = _mm256_adds_epi16(sum, _mm256_maddubs_epi16(weights, activations));
  }
  static void end(Sum sum, Int& total) {
    total = _mm256_add_epi32(total, _mm256_madd_epi16(sum, _mm256_set1_epi16(1)));
  }
};

template <>
struct Avx2Pairs::Dot<false> {
  static constexpr int kRows = 2;
  static constexpr int kRegisters = 2;
  struct Weights {
    Bytes low, high;
  };
  struct Sum {
    Int low, high;
  };
  static Weights weights(Bytes bytes) { return {low_nibbles(bytes), high_nibbles(bytes)}; }
  static void begin(Sum& sum, Int) { sum.low = sum.high = _mm256_setzero_si256(); }
  static void add(Sum& sum, const Weights& weights, Activations activations) {
    sum.low = _mm256_adds_epi16(sum.low, _mm256_maddubs_epi16(weights.low, activations));
    sum.high = _mm256_adds_epi16(sum.high, _mm256_maddubs_epi16(weights.high, activations));
  }
  static void end(const Sum& sum, Int& total) {
    total = _mm256_add_epi32(total, _mm256_madd_epi16(sum.low, _mm256_set1_epi16(1)));
    total = _mm256_add_epi32(total, _mm256_madd_epi16(sum.high, _mm256_set1_epi16(16)));
  }
};

#if defined(__AVXVNNI__)
struct Avx2Vnni : Avx2Integers {
  template <bool kNibbles>
  struct Dot {
    static constexpr int kRows = kNibbles ? 2 : 3;
    static constexpr int kRegisters = 4;
    using Weights = Bytes;
    using Sum = Int;
    static Weights weights(Bytes bytes) { return bytes; }
    static void begin(Sum& sum, Int total) { sum = total; }
    static void add(Sum& sum, Weights weights, Activations activations) {
      sum = _mm256_dpbusd_avx_epi32(sum, weights, activations);
    }
    static void end(Sum sum, Int& total) { total = sum; }
  };
};
#endif

}  // namespace
}  // namespace octavo
