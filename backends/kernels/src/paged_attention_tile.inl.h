// A tile of rows: its working memory, its queries and where its keys lie. Internal to
// paged_attention_kernel.inl.h.
#pragma once

#include "paged_attention_heads.inl.h"
#include "paged_attention_kernel.h"
#include "paged_attention_math.inl.h"

namespace octavo {
namespace {

enum Plane : int64_t { kKeys, kValues };

// Where the keys or values of a head, or their scales, start.
inline int64_t scales_start(const AttentionProblem& p, int64_t block, Plane plane, int kv_head) {
  return ((2 * block + plane) * p.num_kv_heads + kv_head) * p.block_size;
}
inline int64_t head_start(const AttentionProblem& p, int64_t block, Plane plane, int kv_head) {
  return scales_start(p, block, plane, kv_head) * p.cache_size;
}

// A tile's constants and working memory.
struct TileWork {
  const AttentionProblem* problem;
  RowTile tile;
  const int32_t* block_table;  // [table_width]
  float* query;                // for each group of <= kRows rows: [key_size, rows], scaled
  float* scores;               // [num_rows, kSubBlock]
  int64_t* first_key;          // [num_rows], keys that each row sees: [first_key, last_key)
  int64_t* last_key;           // [num_rows]; both rise from row to row
  float* keys;                 // [kSubBlock / 16, key_size, 16]: integers made floats, or null
  float* values;               // [kSubBlock, padded_value_size] likewise
  PartialResult total;
  PartialResult segment;
};

// Hands out pieces of one scratch buffer; without a buffer it only counts.
struct Carver {
  float* buffer;
  int64_t used;

  float* take(int64_t count) {
    float* taken = buffer == nullptr ? nullptr : buffer + used;
    used += round_up(count, kKeyGroup);
    return taken;
  }
  int64_t* take_positions(int64_t count) {
    return reinterpret_cast<int64_t*>(take(2 * count));
  }
};

inline PartialResult take_partial(const AttentionProblem& p, int32_t num_rows, Carver& carver) {
  PartialResult partial;
  partial.accumulator = carver.take(int64_t{num_rows} * padded_value_size(p));
  partial.maximum = carver.take(num_rows);
  partial.sum = carver.take(num_rows);
  return partial;
}

// Whether a tile has so few rows, a few passes of the registers, that it waits for memory: it then
// prefetches, and reads integers as they are. Higher tiles have work enough to wait for.
template <class V>
constexpr bool waits_for_memory(int num_rows) {
  return num_rows <= 3 * V::kRows;
}

template <class V>
void carve(const AttentionProblem& p, int32_t num_rows, Carver& carver, TileWork& work) {
  work.query = carver.take(int64_t{num_rows} * p.key_size);
  work.scores = carver.take(int64_t{num_rows} * kSubBlock);
  work.first_key = carver.take_positions(num_rows);
  work.last_key = carver.take_positions(num_rows);
  if (p.scales != nullptr && !waits_for_memory<V>(num_rows)) {
    work.keys = carver.take(int64_t{kSubBlock} * p.key_size);
    work.values = carver.take(int64_t{kSubBlock} * padded_value_size(p));
  }
  work.total = take_partial(p, num_rows, carver);
  work.segment = take_partial(p, num_rows, carver);
}

struct HeadRow {
  int64_t token;
  int32_t head;
};

inline HeadRow head_row(const AttentionProblem& p, const RowTile& tile, int row) {
  const int group = p.num_heads / p.num_kv_heads;
  const int64_t index = tile.first_row + row;
  return {p.query_start_loc[tile.sequence] + index / group,
          tile.kv_head * group + static_cast<int32_t>(index % group)};
}

// With a softcap the scores come out as the argument of tanh, times 2 log2(e).
inline float query_factor(const AttentionProblem& p) {
  return p.softcap > 0.0f ? p.scale / p.softcap * (2.0f * kLog2E) : p.scale * kLog2E;
}

template <class V>
void pack_queries(const TileWork& work) {
  const AttentionProblem& p = *work.problem;
  const float factor = query_factor(p);
  const int num_rows = work.tile.num_rows;
  HeadBuffer buffer;
  for (int first = 0; first < num_rows; first += V::kRows) {
    const int rows = smaller(V::kRows, num_rows - first);
    float* packed = work.query + int64_t{first} * p.key_size;
    for (int r = 0; r < rows; ++r) {
      const HeadRow at = head_row(p, work.tile, first + r);
      const float* source = p.query + at.token * p.query_stride + int64_t{at.head} * p.key_size;
      const float* query = prepare_head<V>(p, source, p.query_norm, at.token, buffer);
      for (int d = 0; d < p.key_size; ++d) packed[d * rows + r] = query[d] * factor;
    }
  }
}

template <class V>
TileWork start_tile(const AttentionProblem& p, const RowTile& tile, float* scratch) {
  TileWork work{};
  work.problem = &p;
  work.tile = tile;
  work.block_table = p.block_tables + tile.sequence * p.table_width;
  Carver carver{scratch, 0};
  carve<V>(p, tile.num_rows, carver, work);
  for (int row = 0; row < tile.num_rows; ++row) {
    const KeyRange keys = visible_keys(p, tile.sequence, tile.first_row + row);
    work.first_key[row] = keys.first;
    work.last_key[row] = keys.last;
  }
  pack_queries<V>(work);
  return work;
}

// Where the keys and values of a sub-block lie.
template <class Element>
struct SubBlock {
  int64_t start;
  const Element* keys[kGroupsPerSubBlock];    // [key_size, 16]
  const Element* values[kGroupsPerSubBlock];  // [16, value_size]
  const float* key_scales[kGroupsPerSubBlock];    // [16]; null: the elements are the numbers
  const float* value_scales[kGroupsPerSubBlock];  // [16] likewise
};

// A sub-block and the one after it. A tile of few rows waits for memory, and blocks that lie
// apart defeat the hardware's prefetching: each load is then paired with a prefetch of the same
// place one sub-block further on.
template <class Element, bool Prefetch>
struct SubBlocks {
  SubBlock<Element> now;
  SubBlock<Element> next;
  int64_t key_stride;    // elements from one row of 16 keys to the next
  int64_t value_stride;  // elements from one value to the next
};

// Into the second-level cache; the address need not be valid.
template <class Element>
inline void prefetch(const Element* p) {
  __builtin_prefetch(p, 0, 2);
}

// Groups of which no row sees a key are given the place of one of which some row does: their block
// may not exist, and what is read in their stead is masked.
template <class Element>
SubBlock<Element> locate(const TileWork& work, int64_t start) {
  const AttentionProblem& p = *work.problem;
  const int kv_head = work.tile.kv_head;
  const int64_t first = work.first_key[0], last = work.last_key[work.tile.num_rows - 1] - 1;
  const Element* const cache = static_cast<const Element*>(p.cache);
  SubBlock<Element> at{};
  at.start = start;
  for (int g = 0; g < kGroupsPerSubBlock; ++g) {
    int64_t position = start + g * kKeyGroup;
    position = smaller(position, last / kKeyGroup * kKeyGroup);
    position = larger(position, first / kKeyGroup * kKeyGroup);
    const int64_t block = work.block_table[position / p.block_size];
    const int64_t offset = position % p.block_size;
    at.keys[g] = cache + head_start(p, block, kKeys, kv_head) + offset;
    at.values[g] = cache + head_start(p, block, kValues, kv_head) + offset * p.cache_size;
    if (p.scales == nullptr) continue;
    at.key_scales[g] = p.scales + scales_start(p, block, kKeys, kv_head) + offset;
    at.value_scales[g] = p.scales + scales_start(p, block, kValues, kv_head) + offset;
  }
  return at;
}

}  // namespace
}  // namespace octavo
