// The passes over a row that sampling makes, for the instruction set V. Included once by each
// sampling_<set>.cc; everything is in an unnamed namespace, see paged_attention_kernel.inl.h.
//
// Exactness. A weight has one formula. Every sum of weights is exact, see sampling_kernel.h, and
// maxima and comparisons do not round; so blocks and lanes are free to be what is fast.
#pragma once

#include "kernel_arithmetic.h"
#include "kernel_exp2.h"
#include "sampling_kernel.h"

namespace octavo {
namespace {

constexpr float kInfinity = __builtin_inff();

// Calls body(columns, block) with the kSamplingBlock columns of each block; those behind the end
// are -infinity.
template <class Body>
inline void for_each_block(const float* logits, int64_t count, const Body& body) {
  const int64_t whole = count / kSamplingBlock;
  for (int64_t block = 0; block < whole; ++block) body(logits + block * kSamplingBlock, block);
  const int64_t left = count - whole * kSamplingBlock;
  if (left == 0) return;
  alignas(64) float columns[kSamplingBlock];
  for (int64_t i = 0; i < kSamplingBlock; ++i)
    columns[i] = i < left ? logits[whole * kSamplingBlock + i] : -kInfinity;
  body(columns, whole);
}

// A maximum may lose a NaN, a sum does not. Its terms are made so small that they do not overflow,
// which would add +infinity to a -infinity.
template <class V>
float largest(const float* logits, int64_t count, float* maxima) {
  using Vec = typename V::Vec;
  constexpr int kRegisters = kSamplingLanes / V::kLanes;
  constexpr int kChains = 4;
  const Vec tiny = V::set1(0x1p-40f);
  Vec best = V::set1(-kInfinity), sums[kChains];
  OCTAVO_UNROLL
  for (int i = 0; i < kChains; ++i) sums[i] = V::set1(0.0f);
  for_each_block(logits, count, [&](const float* columns, int64_t block) {
    Vec most[kRegisters];
    OCTAVO_UNROLL
    for (int i = 0; i < kRegisters; ++i) most[i] = V::set1(-kInfinity);
    OCTAVO_UNROLL
    for (int column = 0; column < kSamplingBlock; column += kSamplingLanes)
      OCTAVO_UNROLL
      for (int i = 0; i < kRegisters; ++i) {
        const Vec x = V::load(columns + column + i * V::kLanes);
        Vec& sum = sums[(column / V::kLanes + i) % kChains];
        most[i] = V::max(x, most[i]);
        sum = V::fma(x, tiny, sum);
      }
    OCTAVO_UNROLL
    for (int i = 0; i < kRegisters; ++i) {
      V::store(maxima + block * kSamplingLanes + i * V::kLanes, most[i]);
      best = V::max(best, most[i]);
    }
  });
  const float sum = V::reduce_add(V::add(V::add(sums[0], sums[1]), V::add(sums[2], sums[3])));
  return sum != sum ? sum : V::reduce_max(best);
}

template <class V>
inline typename V::Vec weight(typename V::Vec logit, typename V::Vec largest,
                              typename V::Vec scale) {
  // 1.5 * 2^-11 has units of 2^-34: adding it rounds away what a weight has below them.
  const auto round = V::set1(0x1.8p-11f);
  const auto power = exp2<V>(V::mul(V::sub(logit, largest), scale));
  return V::sub(V::add(power, round), round);
}

template <class V>
void weigh(const float* logits, int64_t count, float largest, float scale, float threshold,
           float* weights, double* sums) {
  const auto top = V::set1(largest), factor = V::set1(scale), bound = V::set1(threshold);
  for_each_block(logits, count, [&](const float* columns, int64_t block) {
    float* to = weights + block * kSamplingBlock;
    typename V::Wide sum{};
    OCTAVO_UNROLL
    for (int64_t i = 0; i < kSamplingBlock; i += V::kLanes) {
      const auto x = V::load(columns + i);
      const auto w = V::select(V::less(x, bound), V::set1(0.0f), weight<V>(x, top, factor));
      V::store(to + i, w);
      sum = V::add_wide(sum, w);
    }
    sums[block] = V::reduce_wide(sum);
  });
}

template <class V>
void mask(const float* logits, int64_t count, float threshold, float* weights, double* sums) {
  const auto bound = V::set1(threshold);
  for_each_block(logits, count, [&](const float* columns, int64_t block) {
    float* at = weights + block * kSamplingBlock;
    typename V::Wide sum{};
    OCTAVO_UNROLL
    for (int64_t i = 0; i < kSamplingBlock; i += V::kLanes) {
      const auto below = V::less(V::load(columns + i), bound);
      const auto w = V::select(below, V::set1(0.0f), V::load(at + i));
      V::store(at + i, w);
      sum = V::add_wide(sum, w);
    }
    sums[block] = V::reduce_wide(sum);
  });
}

// Whether no column of a block can reach the threshold.
template <class V>
inline bool all_less(const float* maxima, int64_t block, typename V::Vec threshold) {
  constexpr unsigned kAll = (1u << V::kLanes) - 1;
  if (maxima == nullptr) return false;
  unsigned less = kAll;
  OCTAVO_UNROLL
  for (int i = 0; i < kSamplingLanes; i += V::kLanes)
    less &= V::bits(V::less(V::load(maxima + block * kSamplingLanes + i), threshold));
  return less == kAll;
}

template <class V, bool kWeights>
SamplingMass measure_with(const float* logits, const float* weights, int64_t count,
                          const float* maxima, float threshold) {
  const auto bound = V::set1(threshold), zero = V::set1(0.0f), one = V::set1(1.0f);
  SamplingMass found{};
  for_each_block(logits, count, [&](const float* columns, int64_t block) {
    if (all_less<V>(maxima, block, bound)) return;
    auto ones = zero;
    typename V::Wide sum{};
    OCTAVO_UNROLL
    for (int64_t i = 0; i < kSamplingBlock; i += V::kLanes) {
      const auto below = V::less(V::load(columns + i), bound);
      ones = V::add(ones, V::select(below, zero, one));
      if constexpr (kWeights)
        sum = V::add_wide(
            sum, V::select(below, zero, V::load(weights + block * kSamplingBlock + i)));
    }
    found.count += static_cast<int64_t>(V::reduce_add(ones));
    if constexpr (kWeights) found.mass += V::reduce_wide(sum);
  });
  return found;
}

template <class V>
SamplingMass measure(const float* logits, const float* weights, int64_t count, const float* maxima,
                     float threshold) {
  return weights == nullptr ? measure_with<V, false>(logits, weights, count, maxima, threshold)
                            : measure_with<V, true>(logits, weights, count, maxima, threshold);
}

// Calls body(index, x, chosen) with registers of columns, of which those at least `low` and less
// than `high` are chosen, in blocks that have such columns perhaps. `done` ends it between blocks.
template <class V, class Done, class Body>
inline void for_each_between(const float* logits, int64_t count, const float* maxima, float low,
                             float high, const Done& done, const Body& body) {
  constexpr unsigned kAll = (1u << V::kLanes) - 1;
  const auto bottom = V::set1(low), top = V::set1(high);
  for_each_block(logits, count, [&](const float* columns, int64_t block) {
    if (done() || all_less<V>(maxima, block, bottom)) return;
    const int64_t start = block * kSamplingBlock;
    // Behind the end are -infinities, which a threshold of -infinity would find.
    const int64_t columns_left = smaller(count - start, kSamplingBlock);
    for (int64_t i = 0; i < columns_left; i += V::kLanes) {
      const auto x = V::load(columns + i);
      unsigned chosen = V::bits(V::less(x, top)) & (V::bits(V::less(x, bottom)) ^ kAll);
      if (columns_left - i < V::kLanes) chosen &= (1u << (columns_left - i)) - 1;
      body(start + i, x, chosen);
    }
  });
}

template <class V>
int64_t at_least(const float* logits, int64_t count, const float* maxima, float threshold,
                 int64_t limit, int32_t* indices) {
  int64_t found = 0;
  for_each_between<V>(
      logits, count, maxima, threshold, kInfinity, [&] { return found > limit; },
      [&](int64_t index, typename V::Vec, unsigned chosen) {
        for (; chosen != 0; chosen &= chosen - 1)
          indices[found++] = static_cast<int32_t>(index + __builtin_ctz(chosen));
      });
  return found;
}

template <class V>
int64_t gather(const float* logits, const float* weights, int64_t count, const float* maxima,
               float low, float high, float* to_logits, float* to_weights) {
  int64_t found = 0;
  for_each_between<V>(
      logits, count, maxima, low, high, [] { return false; },
      [&](int64_t index, typename V::Vec x, unsigned chosen) {
        if (chosen == 0) return;
        V::store_chosen(to_logits + found, x, chosen);
        if (weights != nullptr)
          V::store_chosen(to_weights + found, V::load(weights + index), chosen);
        found += __builtin_popcount(chosen);
      });
  return found;
}

template <class V>
int64_t count_larger(const float* logits, int64_t count, float x) {
  const auto bound = V::set1(x), one = V::set1(1.0f), zero = V::set1(0.0f);
  int64_t larger = 0;
  for_each_block(logits, count, [&](const float* columns, int64_t) {
    auto ones = zero;
    for (int64_t i = 0; i < kSamplingBlock; i += V::kLanes)
      ones = V::add(ones, V::select(V::less(bound, V::load(columns + i)), one, zero));
    larger += static_cast<int64_t>(V::reduce_add(ones));
  });
  return larger;
}

template <class V>
constexpr SamplingKernel kSampling{largest<V>,  weigh<V>,  mask<V>,        measure<V>,
                                   at_least<V>, gather<V>, count_larger<V>};

}  // namespace
}  // namespace octavo
