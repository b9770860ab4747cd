// Sixteen floats in a register: AVX-512 F, VL, BW and DQ. See simd_portable.h for what each
// function means.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#include "simd_tiles.h"

namespace octavo {
namespace {

struct Avx512 {
  static constexpr int kLanes = 16;
  static constexpr int kRows = kRowsOf32Registers;
  static constexpr int kAccumulators = kAccumulatorsOf32Registers;

  using Vec = __m512;
  using Mask = __mmask16;
  struct Wide {
    __m512d low, high;
  };

  static Vec set1(float x) { return _mm512_set1_ps(x); }
  static Vec load(const float* p) { return _mm512_loadu_ps(p); }
  static Vec load_first(const float* p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
  static Vec load_int8(const int8_t* p) {
    return from_int8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static Vec load_first_int8(const int8_t* p, int n) {
    return from_int8(_mm_maskz_loadu_epi8(first_lanes(n), p));
  }
  static void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
  static void store_first(float* p, Vec x, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), x); }

  static Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
  static Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
  static Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
  static Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
  static Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
  static Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
  static Vec abs(Vec x) { return _mm512_andnot_ps(_mm512_set1_ps(-0.0f), x); }
  static Vec copy_sign(Vec magnitude, Vec sign) {
    return _mm512_or_ps(magnitude, _mm512_and_ps(_mm512_set1_ps(-0.0f), sign));
  }
  static Vec bits_to_exponent(Vec x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(x), 23));
  }
  static Vec iota() {
    return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  }

  static Vec swap_neighbours(Vec x) { return _mm512_permute_ps(x, 0xb1); }

  static Mask less(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
  static Vec select(Mask m, Vec yes, Vec no) { return _mm512_mask_blend_ps(m, no, yes); }

  // Halves are added in the same order as in the other sets: 8 + 8, 4 + 4, 2 + 2, 1 + 1.
  static float reduce_add(Vec x) {
    const __m256 y = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 z = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    z = _mm_add_ps(z, _mm_movehl_ps(z, z));
    return _mm_cvtss_f32(_mm_add_ss(z, _mm_shuffle_ps(z, z, 1)));
  }
  static float reduce_max(Vec x) {
    const __m256 y = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 z = _mm_max_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    z = _mm_max_ps(z, _mm_movehl_ps(z, z));
    return _mm_cvtss_f32(_mm_max_ss(z, _mm_shuffle_ps(z, z, 1)));
  }
  static float first(Vec x) { return _mm512_cvtss_f32(x); }
  static unsigned bits(Mask m) { return m; }
  static void store_chosen(float* p, Vec x, unsigned chosen) {
    _mm512_storeu_ps(p, _mm512_maskz_compress_ps(static_cast<__mmask16>(chosen), x));
  }

  static Wide add_wide(Wide sum, Vec x) {
    return {_mm512_add_pd(sum.low, _mm512_cvtps_pd(_mm512_castps512_ps256(x))),
            _mm512_add_pd(sum.high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)))};
  }
  static double reduce_wide(Wide sum) {
    return _mm512_reduce_add_pd(_mm512_add_pd(sum.low, sum.high));
  }

 private:
  static Vec from_int8(__m128i x) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(x)); }
  static __mmask16 first_lanes(int n) {
    return static_cast<__mmask16>(n >= kLanes ? 0xffff : (1u << n) - 1);
  }
};

}  // namespace
}  // namespace octavo
