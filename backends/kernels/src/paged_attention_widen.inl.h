// The integers of a sub-block as floats, for tiles whose rows all read them again. Their scales are
// not applied here: they go into scores and weights. Internal to paged_attention_kernel.inl.h.
#pragma once

#include "paged_attention_kernel.h"
#include "paged_attention_math.inl.h"
#include "paged_attention_tile.inl.h"

namespace octavo {
namespace {

template <class V>
void widen_keys(const int8_t* source, int64_t stride, int key_size, float* to) {
  for (int d = 0; d < key_size; ++d, source += stride, to += kKeyGroup)
    for (int key = 0; key < kKeyGroup; key += V::kLanes)
      V::store(to + key, V::load_int8(source + key));
}

template <class V>
void widen_values(const int8_t* source, int64_t stride, int value_size, int padded_size,
                  float* to) {
  for (int key = 0; key < kKeyGroup; ++key, source += stride, to += padded_size) {
    int i = 0;
    for (; i + V::kLanes <= value_size; i += V::kLanes)
      V::store(to + i, V::load_int8(source + i));
    if (i < value_size) V::store(to + i, V::load_first_int8(source + i, value_size - i));
  }
}

// The same sub-block in the tile's working memory.
template <class V>
SubBlock<float> widen(const TileWork& work, const SubBlock<int8_t>& from) {
  const AttentionProblem& p = *work.problem;
  const int padded_size = padded_value_size(p);
  SubBlock<float> to{};
  to.start = from.start;
  for (int g = 0; g < kGroupsPerSubBlock; ++g) {
    float* const keys = work.keys + int64_t{g} * kKeyGroup * p.key_size;
    float* const values = work.values + int64_t{g} * kKeyGroup * padded_size;
    widen_keys<V>(from.keys[g], p.block_size, p.key_size, keys);
    widen_values<V>(from.values[g], p.cache_size, p.value_size, padded_size, values);
    to.keys[g] = keys;
    to.values[g] = values;
    to.key_scales[g] = from.key_scales[g];
    to.value_scales[g] = from.value_scales[g];
  }
  return to;
}

}  // namespace
}  // namespace octavo
