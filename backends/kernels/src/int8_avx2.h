// Floats to signed 8-bit integers: AVX2. See int8_portable.h for what each function means.
#pragma once

#include <stdint.h>

#include "simd_avx2.h"

namespace octavo {
namespace {

template <class V>
struct Int8;

template <>
struct Int8<Avx2> {
  static float largest_magnitude(const __m256* x) {
    const __m256i largest = _mm256_max_epi32(_mm256_max_epi32(magnitude(x[0]), magnitude(x[1])),
                                             _mm256_max_epi32(magnitude(x[2]), magnitude(x[3])));
    __m128i y =
        _mm_max_epi32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
    y = _mm_max_epi32(y, _mm_shuffle_epi32(y, 0x4e));
    y = _mm_max_epi32(y, _mm_shuffle_epi32(y, 0xb1));
    return _mm_cvtss_f32(_mm_castsi128_ps(y));
  }

  template <bool kCareful>
  static int32_t store(const __m256* x, float factor, int8_t* to) {
    const __m256i bytes = pack<kCareful>(x, _mm256_set1_ps(factor));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bytes);
    return sum(bytes);
  }

 private:
  static __m256i magnitude(__m256 x) {
    return _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fffffff));
  }
  // x86's maximum and minimum return their second operand where one is NaN.
  template <bool kCareful>
  static __m256i round(__m256 x) {
    if constexpr (!kCareful) return _mm256_cvtps_epi32(x);
    x = _mm256_min_ps(_mm256_set1_ps(127.0f), _mm256_max_ps(_mm256_set1_ps(-127.0f), x));
    return _mm256_cvtps_epi32(_mm256_and_ps(x, _mm256_cmp_ps(x, x, _CMP_ORD_Q)));
  }
  template <bool kCareful>
  static __m256i pack(const __m256* x, __m256 factor) {
    const __m256i low = _mm256_packs_epi32(round<kCareful>(_mm256_mul_ps(x[0], factor)),
                                           round<kCareful>(_mm256_mul_ps(x[1], factor)));
    const __m256i high = _mm256_packs_epi32(round<kCareful>(_mm256_mul_ps(x[2], factor)),
                                            round<kCareful>(_mm256_mul_ps(x[3], factor)));
    // Both packs work within halves of a register: fours of integers are put back in order.
    return _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high),
                                       _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  }
  static int32_t sum(__m256i bytes) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes);
    const __m256i fours = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    __m128i y = _mm_add_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));
    y = _mm_add_epi32(y, _mm_shuffle_epi32(y, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(y, _mm_shuffle_epi32(y, 0xb1)));
  }
};

}  // namespace
}  // namespace octavo
