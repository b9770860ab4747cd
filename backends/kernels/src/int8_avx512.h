// Floats to signed 8-bit integers: AVX-512 F, VL, BW and DQ. See int8_portable.h for what each
// function means.
#pragma once

#include <stdint.h>

#include "simd_avx512.h"

namespace octavo {
namespace {

template <class V>
struct Int8;

template <>
struct Int8<Avx512> {
  static float largest_magnitude(const __m512* x) {
    const __m512i largest = _mm512_max_epi32(magnitude(x[0]), magnitude(x[1]));
    const __m256i half = _mm256_max_epi32(_mm512_castsi512_si256(largest),
                                          _mm512_extracti64x4_epi64(largest, 1));
    __m128i y = _mm_max_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    y = _mm_max_epi32(y, _mm_shuffle_epi32(y, 0x4e));
    y = _mm_max_epi32(y, _mm_shuffle_epi32(y, 0xb1));
    return _mm_cvtss_f32(_mm_castsi128_ps(y));
  }

  template <bool kCareful>
  static int32_t store(const __m512* x, float factor, int8_t* to) {
    const __m512 f = _mm512_set1_ps(factor);
    auto* at = reinterpret_cast<__m128i*>(to);
    const __m512i low = round<kCareful>(_mm512_mul_ps(x[0], f));
    const __m512i high = round<kCareful>(_mm512_mul_ps(x[1], f));
    _mm_storeu_si128(at, _mm512_cvtepi32_epi8(low));
    _mm_storeu_si128(at + 1, _mm512_cvtepi32_epi8(high));
    const __m512i pairs = _mm512_add_epi32(low, high);
    const __m256i fours = _mm256_add_epi32(_mm512_castsi512_si256(pairs),
                                           _mm512_extracti64x4_epi64(pairs, 1));
    __m128i y = _mm_add_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));
    y = _mm_add_epi32(y, _mm_shuffle_epi32(y, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(y, _mm_shuffle_epi32(y, 0xb1)));
  }

 private:
  static __m512i magnitude(__m512 x) {
    return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff));
  }
  // x86's maximum and minimum return their second operand where one is NaN.
  template <bool kCareful>
  static __m512i round(__m512 x) {
    if constexpr (!kCareful) return _mm512_cvtps_epi32(x);
    x = _mm512_min_ps(_mm512_set1_ps(127.0f), _mm512_max_ps(_mm512_set1_ps(-127.0f), x));
    return _mm512_maskz_cvtps_epi32(_mm512_cmp_ps_mask(x, x, _CMP_ORD_Q), x);
  }
};

}  // namespace
}  // namespace octavo
