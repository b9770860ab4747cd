// The interface between the task split (paged_attention.cc, built for the baseline CPU) and the
// arithmetic (paged_attention_<set>.cc, each built for its own instruction set). Plain data only:
// a template or inline function shared with an instruction set's file could be emitted there and
// then be picked by the linker for every CPU.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace octavo {

// Every row's arithmetic is cut at these absolute key positions and nowhere else, so that its
// result does not depend on the batch, the chunk, the tile or the thread it is computed in.
constexpr int kKeyGroup = 16;  // keys in a row of registers; divides every block size
constexpr int kSubBlock = 64;  // keys between two updates of a row's running maximum
constexpr int kSegment = 512;  // keys whose partial result starts from nothing

constexpr int kMaxHeadSize = 512;

// Turns pairs of a head's first `size` elements.
struct RotaryEmbedding {
  const float* cos;  // [T, size]
  const float* sin;  // [T, size]
  int32_t size;      // 0: none
  bool interleaved;  // pairs (2 i, 2 i + 1), otherwise (i, i + size / 2)
};

// One call of an op; every index in it has been checked. A stride is the floats from one token's
// heads to the next token's, so that packed rows are read where they lie.
struct AttentionProblem {
  const float* query;  // [T, H, key_size], before norm and rotary embedding
  const float* key;    // [T, Hkv, key_size], likewise
  const float* value;  // [T, Hkv, value_size]
  int64_t query_stride;
  int64_t key_stride;
  int64_t value_stride;
  const float* query_norm;  // [key_size] or null
  const float* key_norm;    // [key_size] or null
  float norm_epsilon;
  RotaryEmbedding rotary;
  void* cache;                     // [N, 2, Hkv, block_size, cache_size], f32 or, with scales, s8
  float* scales;                   // [N, 2, Hkv, block_size] or null
  const int32_t* slot_mapping;     // [T]
  const int32_t* block_tables;     // [B, table_width]
  const int32_t* query_start_loc;  // [B + 1]
  const int32_t* prefix_offsets;   // [B]
  const float* sinks;              // [H] or null
  const float* alibi_slopes;       // [H] or null
  float* output;                   // [T, H, value_size]
  int64_t num_tokens;
  int64_t num_blocks;
  int64_t table_width;
  int32_t num_sequences;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t key_size;
  int32_t value_size;
  int32_t cache_size;
  int32_t block_size;
  int32_t sliding_window;  // 0: none
  float scale;
  float softcap;  // 0: none
  bool causal;
};

// Some rows of one sequence and one KV head. Row r is query token r / group of the step and head
// r % group of the KV head's group, where group = H / Hkv: neighbours see nearly the same keys.
struct RowTile {
  int32_t sequence;
  int32_t kv_head;
  int64_t first_row;
  int32_t num_rows;
};

// What a tile knows after some segments: for each row its maximum (in units of log2), the sum of
// its exponentials and the sum of the values they weigh.
struct PartialResult {
  float* accumulator;  // [num_rows, padded_value_size]
  float* maximum;      // [num_rows]
  float* sum;          // [num_rows]
};

struct AttentionKernel {
  int32_t row_multiple;  // tiles of a multiple of this many rows leave no register idle

  // Writes a token's key and value of one KV head into the cache, where it has a slot.
  void (*write_token)(const AttentionProblem&, int64_t token, int32_t kv_head);
  // Floats of scratch that the functions below need for a tile of `num_rows` rows.
  int64_t (*scratch_size)(const AttentionProblem&, int32_t num_rows);
  // Attends all keys and writes the tile's rows of the output.
  void (*attend_tile)(const AttentionProblem&, const RowTile&, float* scratch);
  // Attends the segments [first, last), leaving their partial results in `partials`, one after
  // the other.
  void (*attend_segments)(const AttentionProblem&, const RowTile&, int64_t first, int64_t last,
                          float* partials, float* scratch);
  // Merges the partial results of all of the tile's segments, in order, and writes the output.
  void (*merge_segments)(const AttentionProblem&, const RowTile&, float* partials, int64_t count);
};

// Keys [first, last) that a row sees.
struct KeyRange {
  int64_t first;
  int64_t last;
};

// In this header because both sides must agree; static, so that each file has its own copy.
static inline KeyRange visible_keys(const AttentionProblem& p, int32_t sequence, int64_t row) {
  const int64_t prefix = p.prefix_offsets[sequence];
  const int64_t position = prefix + row / (p.num_heads / p.num_kv_heads);
  const int64_t length =
      prefix + p.query_start_loc[sequence + 1] - p.query_start_loc[sequence];
  const int64_t window_start = position - p.sliding_window + 1;
  const bool windowed = p.sliding_window > 0 && window_start > 0;
  return {windowed ? window_start : 0, p.causal ? position + 1 : length};
}

static inline int32_t padded_value_size(const AttentionProblem& p) {
  return (p.value_size + kKeyGroup - 1) / kKeyGroup * kKeyGroup;
}

// Floats of one partial result of a tile in a buffer, and where its parts lie.
static inline int64_t partial_result_floats(const AttentionProblem& p, int32_t num_rows) {
  const int64_t padded_rows = (num_rows + kKeyGroup - 1) / kKeyGroup * kKeyGroup;
  return int64_t{num_rows} * padded_value_size(p) + 2 * padded_rows;
}

static inline PartialResult partial_result_at(const AttentionProblem& p, int32_t num_rows,
                                              float* at) {
  const int64_t padded_rows = (num_rows + kKeyGroup - 1) / kKeyGroup * kKeyGroup;
  float* maximum = at + int64_t{num_rows} * padded_value_size(p);
  return {at, maximum, maximum + padded_rows};
}

const AttentionKernel& paged_attention_portable();
const AttentionKernel& paged_attention_avx2();
const AttentionKernel& paged_attention_avx512();
const AttentionKernel& paged_attention_lanes16();

}  // namespace octavo
