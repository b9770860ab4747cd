// What happens to a row of scores: scales, softcap, ALiBi, masks, exponentials. Internal to
// paged_attention_kernel.inl.h.
#pragma once

#include "paged_attention_kernel.h"
#include "paged_attention_math.inl.h"
#include "paged_attention_tile.inl.h"

namespace octavo {
namespace {

// Softcap and ALiBi on a register of scores; `distance` is key position - query position.
template <class V>
inline typename V::Vec adjust(const AttentionProblem& p, float slope, typename V::Vec score,
                              typename V::Vec distance) {
  using Vec = typename V::Vec;
  if (p.softcap > 0.0f) {
    const Vec one = V::set1(1.0f);
    const Vec e = exp2<V>(V::sub(V::set1(0.0f), V::abs(score)));
    const Vec tanh = V::copy_sign(V::div(V::sub(one, e), V::add(one, e)), score);
    score = V::mul(tanh, V::set1(p.softcap * kLog2E));
  }
  return p.alibi_slopes != nullptr ? V::fma(distance, V::set1(slope * kLog2E), score) : score;
}

template <class V>
void adjust_row(const TileWork& work, int row, int64_t start, float* scores) {
  const AttentionProblem& p = *work.problem;
  const int64_t index = work.tile.first_row + row;
  const int64_t position =
      p.prefix_offsets[work.tile.sequence] + index / (p.num_heads / p.num_kv_heads);
  const float slope =
      p.alibi_slopes != nullptr ? p.alibi_slopes[head_row(p, work.tile, row).head] : 0.0f;
  for (int key = 0; key < kSubBlock; key += V::kLanes) {
    const auto distance = V::add(V::iota(), V::set1(static_cast<float>(start + key - position)));
    V::store(scores + key, adjust<V>(p, slope, V::load(scores + key), distance));
  }
}

template <class V>
void mask_row(float* scores, int first, int last) {
  for (int key = 0; key < kSubBlock; key += V::kLanes) {
    const auto index = V::add(V::iota(), V::set1(static_cast<float>(key)));
    auto x = V::load(scores + key);
    x = V::select(V::less(index, V::set1(static_cast<float>(last))), x, V::set1(kMinusInfinity));
    x = V::select(V::less(index, V::set1(static_cast<float>(first))), V::set1(kMinusInfinity), x);
    V::store(scores + key, x);
  }
}

// row[key] *= scales[key]: scores by the scales of integer keys, weights by those of the values.
template <class V>
void scale_keys(float* row, const float* const scales[kGroupsPerSubBlock]) {
  for (int key = 0; key < kSubBlock; key += V::kLanes) {
    const auto scale = V::load(scales[key / kKeyGroup] + key % kKeyGroup);
    V::store(row + key, V::mul(V::load(row + key), scale));
  }
}

template <class V>
void scale_row(float* row, int size, float factor) {
  for (int i = 0; i < size; i += V::kLanes)
    V::store(row + i, V::mul(V::load(row + i), V::set1(factor)));
}

template <class V>
inline float row_maximum(const float* scores) {
  constexpr int kHalf = kSubBlock / V::kLanes / 2;
  typename V::Vec tops[kHalf];
  for (int j = 0; j < kHalf; ++j)
    tops[j] = V::max(V::load(scores + j * V::kLanes), V::load(scores + (kHalf + j) * V::kLanes));
  for (int n = kHalf / 2; n > 0; n /= 2)
    for (int j = 0; j < n; ++j) tops[j] = V::max(tops[j], tops[j + n]);
  return V::reduce_max(tops[0]);
}

// Turns a row's scores into weights in place and returns their sum, which is made in 16 lanes in
// every instruction set.
template <class V>
inline float exponentiate_row(float* scores, float maximum) {
  constexpr int kLaneRegisters = kKeyGroup / V::kLanes;
  typename V::Vec sums[kLaneRegisters];
  for (int j = 0; j < kLaneRegisters; ++j) sums[j] = V::set1(0.0f);
  for (int key = 0; key < kSubBlock; key += kKeyGroup)
    for (int j = 0; j < kLaneRegisters; ++j) {
      float* at = scores + key + j * V::kLanes;
      const auto weight = exp2<V>(V::sub(V::load(at), V::set1(maximum)));
      V::store(at, weight);
      sums[j] = V::add(sums[j], weight);
    }
  for (int n = kLaneRegisters / 2; n > 0; n /= 2)
    for (int j = 0; j < n; ++j) sums[j] = V::add(sums[j], sums[j + n]);
  return V::reduce_add(sums[0]);
}

// Takes a sub-block's maximum and sum into what the row knows.
template <class V>
inline void update_row(PartialResult& state, int row, int padded_size, float maximum, float sum) {
  const float before = state.maximum[row];
  if (maximum == before) {
    state.sum[row] += sum;
    return;
  }
  const float shrink = exp2_scalar<V>(before - maximum);
  state.maximum[row] = maximum;
  state.sum[row] = state.sum[row] * shrink + sum;
  // A row that has seen no key yet has nothing but zeros to scale.
  if (before > kNoMaximum)
    scale_row<V>(state.accumulator + int64_t{row} * padded_size, padded_size, shrink);
}

}  // namespace
}  // namespace octavo
