// Eight floats in a register: AVX2 and FMA. See simd_portable.h for what each function means.
#pragma once

#include <immintrin.h>
#include <stdint.h>

namespace octavo {
namespace {

// The lanes whose bits are set in a byte, first ones first.
struct ChosenLanes {
  uint8_t of[256][8];
  constexpr ChosenLanes() : of{} {
    for (int bits = 0; bits < 256; ++bits)
      for (int lane = 0, count = 0; lane < 8; ++lane)
        if (bits >> lane & 1) of[bits][count++] = static_cast<uint8_t>(lane);
  }
};
constexpr ChosenLanes kChosenLanes;

struct Avx2 {
  static constexpr int kLanes = 8;
  static constexpr int kRows = 6;  // 6 rows of 2 registers, 2 loads and a broadcast fill 16
  static constexpr int kAccumulators = 12;

  using Vec = __m256;
  using Mask = __m256;
  struct Wide {
    __m256d low, high;
  };

  static Vec set1(float x) { return _mm256_set1_ps(x); }
  static Vec load(const float* p) { return _mm256_loadu_ps(p); }
  static Vec load_first(const float* p, int n) { return _mm256_maskload_ps(p, first_lanes(n)); }
  static Vec load_int8(const int8_t* p) {
    return from_int8(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  static Vec load_first_int8(const int8_t* p, int n) {
    int8_t first[kLanes] = {};
    for (int i = 0; i < kLanes && i < n; ++i) first[i] = p[i];
    return load_int8(first);
  }
  static void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
  static void store_first(float* p, Vec x, int n) { _mm256_maskstore_ps(p, first_lanes(n), x); }

  static Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
  static Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
  static Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
  static Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
  static Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
  static Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
  static Vec abs(Vec x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
  static Vec copy_sign(Vec magnitude, Vec sign) {
    return _mm256_or_ps(magnitude, _mm256_and_ps(_mm256_set1_ps(-0.0f), sign));
  }
  static Vec bits_to_exponent(Vec x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(x), 23));
  }
  static Vec iota() { return _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7); }

  static Vec swap_neighbours(Vec x) { return _mm256_permute_ps(x, 0xb1); }

  static Mask less(Vec a, Vec b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
  static Vec select(Mask m, Vec yes, Vec no) { return _mm256_blendv_ps(no, yes, m); }

  static float reduce_add(Vec x) {
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_shuffle_ps(y, y, 1)));
  }
  static float reduce_max(Vec x) {
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_shuffle_ps(y, y, 1)));
  }
  static float first(Vec x) { return _mm256_cvtss_f32(x); }
  static unsigned bits(Mask m) { return static_cast<unsigned>(_mm256_movemask_ps(m)); }
  static void store_chosen(float* p, Vec x, unsigned chosen) {
    const auto* lanes = reinterpret_cast<const __m128i*>(kChosenLanes.of[chosen]);
    _mm256_storeu_ps(p, _mm256_permutevar8x32_ps(x, _mm256_cvtepu8_epi32(_mm_loadl_epi64(lanes))));
  }

  static Wide add_wide(Wide sum, Vec x) {
    return {_mm256_add_pd(sum.low, _mm256_cvtps_pd(_mm256_castps256_ps128(x))),
            _mm256_add_pd(sum.high, _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)))};
  }
  static double reduce_wide(Wide sum) {
    const __m256d x = _mm256_add_pd(sum.low, sum.high);
    const __m128d y = _mm_add_pd(_mm256_castpd256_pd128(x), _mm256_extractf128_pd(x, 1));
    return _mm_cvtsd_f64(_mm_add_sd(y, _mm_unpackhi_pd(y, y)));
  }

 private:
  static Vec from_int8(__m128i x) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x)); }
  static __m256i first_lanes(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
};

}  // namespace
}  // namespace octavo
