// A token's key and value on their way into the cache. Internal to paged_attention_kernel.inl.h.
#pragma once

#include "paged_attention_heads.inl.h"
#include "paged_attention_kernel.h"
#include "paged_attention_math.inl.h"
#include "paged_attention_tile.inl.h"

namespace octavo {
namespace {

constexpr float kLargestInt8 = 127.0f;
constexpr float kLargestFloat = 3.402823466e+38f;

// The largest magnitude of a row / 127; not finite where an element is not.
struct Magnitude {
  float scale;
  float inverse;  // 127 / the magnitude, or 0
};

template <class V>
Magnitude magnitude_of(const float* x, int size) {
  auto top = V::set1(0.0f), poison = V::set1(0.0f);
  for (int i = 0; i < size; i += V::kLanes) {
    const int left = size - i;
    const auto element = left >= V::kLanes ? V::load(x + i) : V::load_first(x + i, left);
    top = V::max(top, V::abs(element));
    // A maximum may pass over NaN; zero times it is NaN, and so is zero times infinity.
    poison = V::fma(element, V::set1(0.0f), poison);
  }
  const float largest = V::reduce_max(top);
  const float inverse = largest > 0.0f ? kLargestInt8 / largest : 0.0f;
  return {largest / kLargestInt8 + V::reduce_add(poison),
          inverse > kLargestFloat ? kLargestFloat : inverse};
}

// Leaves floats whose lowest byte is the integer: adding 1.5 * 2^23 rounds halves to even and
// puts a two's complement number into the low bits.
template <class V>
void round_to_low_bytes(const float* x, float inverse, int size, float* y) {
  const auto factor = V::set1(inverse), shift = V::set1(12582912.0f);
  int i = 0;
  for (; i + V::kLanes <= size; i += V::kLanes)
    V::store(y + i, V::add(V::mul(V::load(x + i), factor), shift));
  if (i < size)
    V::store(y + i, V::add(V::mul(V::load_first(x + i, size - i), factor), shift));
}

inline int8_t low_byte(const float* x) {
  int32_t bits;
  __builtin_memcpy(&bits, x, sizeof(bits));
  return static_cast<int8_t>(bits & 0xff);
}

struct Slot {
  int64_t block;
  int64_t offset;
  int32_t kv_head;
};

// Keys go in as columns: element d of the token at offset o is at [d][o] of its block.
inline void write_floats(const AttentionProblem& p, const Slot& slot, const float* key,
                         const float* value) {
  float* const cache = static_cast<float*>(p.cache);
  float* keys = cache + head_start(p, slot.block, kKeys, slot.kv_head) + slot.offset;
  float* values = cache + head_start(p, slot.block, kValues, slot.kv_head) +
                  slot.offset * p.cache_size;
  for (int d = 0; d < p.key_size; ++d) keys[int64_t{d} * p.block_size] = key[d];
  __builtin_memcpy(values, value, sizeof(float) * static_cast<size_t>(p.value_size));
}

template <class V>
void write_integers(const AttentionProblem& p, const Slot& slot, const float* key,
                    const float* value) {
  HeadBuffer rounded;
  int8_t* const cache = static_cast<int8_t*>(p.cache);
  const Magnitude of_key = magnitude_of<V>(key, p.key_size);
  round_to_low_bytes<V>(key, of_key.inverse, p.key_size, rounded.at);
  int8_t* keys = cache + head_start(p, slot.block, kKeys, slot.kv_head) + slot.offset;
  for (int d = 0; d < p.key_size; ++d) keys[int64_t{d} * p.block_size] = low_byte(rounded.at + d);

  const Magnitude of_value = magnitude_of<V>(value, p.value_size);
  round_to_low_bytes<V>(value, of_value.inverse, p.value_size, rounded.at);
  int8_t* values = cache + head_start(p, slot.block, kValues, slot.kv_head) +
                   slot.offset * p.cache_size;
  for (int d = 0; d < p.value_size; ++d) values[d] = low_byte(rounded.at + d);

  p.scales[scales_start(p, slot.block, kKeys, slot.kv_head) + slot.offset] = of_key.scale;
  p.scales[scales_start(p, slot.block, kValues, slot.kv_head) + slot.offset] = of_value.scale;
}

template <class V>
void write_token(const AttentionProblem& p, int64_t token, int32_t kv_head) {
  const int32_t index = p.slot_mapping[token];
  if (index < 0) return;
  const Slot slot{index / p.block_size, index % p.block_size, kv_head};
  HeadBuffer buffer;
  const float* source = p.key + token * p.key_stride + int64_t{kv_head} * p.key_size;
  const float* key = prepare_head<V>(p, source, p.key_norm, token, buffer);
  const float* value = p.value + token * p.value_stride + int64_t{kv_head} * p.value_size;
  if (p.scales == nullptr)
    write_floats(p, slot, key, value);
  else
    write_integers<V>(p, slot, key, value);
}

}  // namespace
}  // namespace octavo
