// What happens to a query or key before attention sees it: RMS norm and rotary embedding of one
// head's row. Internal to paged_attention_kernel.inl.h.
#pragma once

#include "paged_attention_kernel.h"
#include "paged_attention_math.inl.h"

namespace octavo {
namespace {

// A row of one head, long enough for every head size.
struct alignas(64) HeadBuffer {
  float at[kMaxHeadSize];
};

// The sum of squares in 16 lanes, which are halved in one order in every instruction set.
template <class V>
float sum_of_squares(const float* x, int size) {
  constexpr int kLaneRegisters = kKeyGroup / V::kLanes;
  typename V::Vec sums[kLaneRegisters];
  for (int j = 0; j < kLaneRegisters; ++j) sums[j] = V::set1(0.0f);
  for (int i = 0; i < size; i += kKeyGroup)
    for (int j = 0; j < kLaneRegisters; ++j) {
      const int left = size - i - j * V::kLanes;
      if (left <= 0) break;
      const float* at = x + i + j * V::kLanes;
      const auto element = left >= V::kLanes ? V::load(at) : V::load_first(at, left);
      sums[j] = V::fma(element, element, sums[j]);
    }
  for (int n = kLaneRegisters / 2; n > 0; n /= 2)
    for (int j = 0; j < n; ++j) sums[j] = V::add(sums[j], sums[j + n]);
  return V::reduce_add(sums[0]);
}

template <class V>
void rms_norm(const float* x, const float* weight, float epsilon, int size, float* y) {
  const float mean = sum_of_squares<V>(x, size) / static_cast<float>(size);
  const auto factor = V::set1(1.0f / __builtin_sqrtf(mean + epsilon));
  int i = 0;
  for (; i + V::kLanes <= size; i += V::kLanes)
    V::store(y + i, V::mul(V::mul(V::load(x + i), factor), V::load(weight + i)));
  if (i == size) return;
  const int left = size - i;
  const auto normed = V::mul(V::load_first(x + i, left), factor);
  V::store_first(y + i, V::mul(normed, V::load_first(weight + i, left)), left);
}

// x * cos + partner * sin, where the sine has the sign that the element's place in its pair asks
// for.
template <class V>
inline typename V::Vec turn(typename V::Vec x, typename V::Vec partner, typename V::Vec cos,
                            typename V::Vec sin) {
  return V::fma(x, cos, V::mul(partner, sin));
}

template <class V>
inline typename V::Vec negate(typename V::Vec x) {
  return V::mul(x, V::set1(-1.0f));
}

// Pairs (i, i + size / 2). y may be x.
template <class V>
void turn_halves(const float* x, const float* cos, const float* sin, int size, float* y) {
  const int half = size / 2;
  int i = 0;
  for (; i + V::kLanes <= half; i += V::kLanes) {
    const int j = i + half;
    const auto a = V::load(x + i), b = V::load(x + j);
    V::store(y + i, turn<V>(a, b, V::load(cos + i), negate<V>(V::load(sin + i))));
    V::store(y + j, turn<V>(b, a, V::load(cos + j), V::load(sin + j)));
  }
  const int left = half - i, j = i + half;
  if (left == 0) return;
  const auto first = [left](const float* at) { return V::load_first(at, left); };
  const auto a = first(x + i), b = first(x + j);
  V::store_first(y + i, turn<V>(a, b, first(cos + i), negate<V>(first(sin + i))), left);
  V::store_first(y + j, turn<V>(b, a, first(cos + j), first(sin + j)), left);
}

// Pairs (2 i, 2 i + 1). y may be x.
template <class V>
void turn_neighbours(const float* x, const float* cos, const float* sin, int size, float* y) {
  constexpr float kSigns[16] = {-1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1};
  const auto signs = V::load(kSigns);
  int i = 0;
  for (; i + V::kLanes <= size; i += V::kLanes) {
    const auto a = V::load(x + i);
    const auto sine = V::mul(V::load(sin + i), signs);
    V::store(y + i, turn<V>(a, V::swap_neighbours(a), V::load(cos + i), sine));
  }
  const int left = size - i;
  if (left == 0) return;
  const auto a = V::load_first(x + i, left);
  const auto sine = V::mul(V::load_first(sin + i, left), signs);
  const auto turned = turn<V>(a, V::swap_neighbours(a), V::load_first(cos + i, left), sine);
  V::store_first(y + i, turned, left);
}

// The row [key_size] of a query or key as attention takes it: the source itself where nothing is
// to be done to it, otherwise in the buffer.
template <class V>
const float* prepare_head(const AttentionProblem& p, const float* source, const float* norm,
                          int64_t token, HeadBuffer& buffer) {
  const RotaryEmbedding& rotary = p.rotary;
  if (norm == nullptr && rotary.size == 0) return source;
  const float* row = source;
  if (norm != nullptr) {
    rms_norm<V>(source, norm, p.norm_epsilon, p.key_size, buffer.at);
    row = buffer.at;
  } else {
    const auto turned = static_cast<size_t>(rotary.size), size = static_cast<size_t>(p.key_size);
    __builtin_memcpy(buffer.at + turned, source + turned, (size - turned) * sizeof(float));
  }
  if (rotary.size == 0) return row;
  const float* cos = rotary.cos + token * rotary.size;
  const float* sin = rotary.sin + token * rotary.size;
  if (rotary.interleaved)
    turn_neighbours<V>(row, cos, sin, rotary.size, buffer.at);
  else
    turn_halves<V>(row, cos, sin, rotary.size, buffer.at);
  return buffer.at;
}

}  // namespace
}  // namespace octavo
