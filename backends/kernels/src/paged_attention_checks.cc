#include "paged_attention_checks.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <limits>

#include "errors.h"

namespace octavo {
namespace {

constexpr int64_t kMaxDimension = std::numeric_limits<int32_t>::max();

void check_heads(const AttentionProblem& p) {
  if (p.num_heads < 1 || p.num_kv_heads < 1 || p.num_heads % p.num_kv_heads != 0)
    refuse("query has %d heads and key %d; the first has to be a multiple of the second",
           p.num_heads, p.num_kv_heads);
  if (std::min(p.key_size, p.value_size) < 1 ||
      std::max(p.key_size, p.value_size) > kMaxHeadSize)
    refuse("the head sizes are %d for keys and %d for values and this kernel takes 1 to %d; use "
           "the op's function body for other sizes",
           p.key_size, p.value_size, kMaxHeadSize);
}

void check_cache(const AttentionProblem& p, const NamedTensor& cache) {
  expect(cache, 1, 2, "one plane of keys and one of values");
  expect(cache, 2, p.num_kv_heads, "the number of KV heads");
  if (p.block_size < kKeyGroup || p.block_size % kKeyGroup != 0)
    refuse("block_size is %d and this kernel needs a multiple of %d; allocate the cache with "
           "another block size",
           p.block_size, kKeyGroup);
  expect(cache, 4, std::max(p.key_size, p.value_size),
         "the larger of the key and the value head size");
}

void check_scales(const NamedTensor& scales, const NamedTensor& cache) {
  for (size_t i = 0; i < scales.rank; ++i)
    expect(scales, i, cache.dims[i], "as of kv_cache: one scale a token, head and plane");
}

void check_slots(const AttentionProblem& p) {
  const int64_t slots = p.num_blocks * p.block_size;
  for (int64_t t = 0; t < p.num_tokens; ++t)
    if (p.slot_mapping[t] < -1 || p.slot_mapping[t] >= slots)
      refuse("slot_mapping[%" PRId64 "] is %d and the cache has slots 0 to %" PRId64
             "; give a slot within the cache or -1 to write nothing",
             t, p.slot_mapping[t], slots - 1);
}

void check_query_start_loc(const AttentionProblem& p) {
  const int32_t* start = p.query_start_loc;
  if (start[0] != 0) refuse("query_start_loc starts with %d and has to start with 0", start[0]);
  for (int32_t b = 0; b < p.num_sequences; ++b)
    if (start[b + 1] < start[b])
      refuse("query_start_loc[%d] is %d, below %d before it; it may not fall", b + 1, start[b + 1],
             start[b]);
  if (start[p.num_sequences] != p.num_tokens)
    refuse("query_start_loc ends with %d and the step has %" PRId64
           " tokens; the two have to be equal",
           start[p.num_sequences], p.num_tokens);
}

void check_length(const AttentionProblem& p, int32_t sequence, int64_t length) {
  const int64_t capacity = std::min(p.table_width * p.block_size, kMaxDimension);
  if (p.prefix_offsets[sequence] < 0)
    refuse("prefix_offsets[%d] is %d; it counts tokens and may not be negative", sequence,
           p.prefix_offsets[sequence]);
  if (length > capacity)
    refuse("sequence %d has %" PRId64 " tokens and its %" PRId64 " blocks of %d hold %" PRId64
           "; give block_tables more columns",
           sequence, length, p.table_width, p.block_size, capacity);
}

void check_blocks(const AttentionProblem& p, int32_t sequence, int64_t num_queries) {
  const int64_t group = p.num_heads / p.num_kv_heads;
  const int64_t first = visible_keys(p, sequence, 0).first / p.block_size;
  const int64_t last = (visible_keys(p, sequence, num_queries * group - 1).last - 1) / p.block_size;
  const int32_t* table = p.block_tables + sequence * p.table_width;
  for (int64_t i = first; i <= last; ++i)
    if (table[i] < 0 || table[i] >= p.num_blocks)
      refuse("block_tables[%d][%" PRId64 "] is %d and the cache has blocks 0 to %" PRId64
             "; every block that holds a visible key has to be within the cache",
             sequence, i, table[i], p.num_blocks - 1);
}

void check_sequences(const AttentionProblem& p) {
  for (int32_t b = 0; b < p.num_sequences; ++b) {
    const int64_t num_queries = p.query_start_loc[b + 1] - p.query_start_loc[b];
    if (num_queries == 0) continue;
    check_length(p, b, p.prefix_offsets[b] + num_queries);
    check_blocks(p, b, num_queries);
  }
}

// [H] or, where the model has none, [0].
const float* read_per_head(const Context& context, size_t index, const char* name,
                           int32_t num_heads) {
  const NamedTensor tensor = read_input(context, index, name, 1);
  if (tensor.dims[0] == 0) return nullptr;
  expect(tensor, 0, num_heads, "one a query head, or 0 for none");
  return tensor.as<const float>();
}

void read_attributes_of(const PagedAttentionAttributes& attributes, AttentionProblem& p) {
  p.sliding_window = attributes.sliding_window;
  p.scale = attributes.scale;
  p.softcap = attributes.softcap;
  p.causal = attributes.causal;
}

}  // namespace

PagedAttentionAttributes read_attention_attributes(const Attributes& attributes) {
  const float scale = attributes.get_or("scale", std::nanf(""));
  if (!std::isfinite(scale)) refuse("the attribute scale is missing or not finite; set it");
  const float softcap = attributes.get_or("softcap", 0.0f);
  if (!(softcap >= 0.0f && std::isfinite(softcap)))
    refuse("softcap is %g and may not be negative; use 0 for none", static_cast<double>(softcap));
  const int64_t window = attributes.get_or("sliding_window", int64_t{0});
  if (window < 0 || window > kMaxDimension)
    refuse("sliding_window is %" PRId64 " and has to lie in 0 to %" PRId64 "; use 0 for none",
           window, kMaxDimension);
  const int64_t causal = attributes.get_or("causal", int64_t{1});
  if (causal != 0 && causal != 1) refuse("causal is %" PRId64 " and has to be 0 or 1", causal);
  const int64_t k_transposed = attributes.get_or("k_transposed", int64_t{0});
  if (k_transposed != 1)
    refuse("k_transposed is %" PRId64
           " and this kernel reads only caches with transposed keys; set it to 1",
           k_transposed);
  return {scale, softcap, static_cast<int32_t>(window), causal == 1};
}

NamedTensor read_input(const Context& context, size_t index, const char* name, size_t rank) {
  const NamedTensor tensor{context.input(index), name};
  if (tensor.rank != rank)
    refuse("%s has %zu dimensions and needs %zu; reshape it before the op", name, tensor.rank,
           rank);
  for (size_t i = 0; i < rank; ++i)
    if (tensor.dims[i] > kMaxDimension)
      refuse("dimension %zu of %s is %" PRId64 ", above %" PRId64
             "; make the step or the cache smaller",
             i, name, tensor.dims[i], kMaxDimension);
  return tensor;
}

void expect(const NamedTensor& tensor, size_t dimension, int64_t size, const char* why) {
  if (tensor.dims[dimension] == size) return;
  refuse("dimension %zu of %s is %" PRId64 " and has to be %" PRId64 ", %s", dimension,
         tensor.name, tensor.dims[dimension], size, why);
}

CacheInputs read_step(const Context& context, const PagedAttentionAttributes& attributes,
                      size_t cache_index, bool scaled, AttentionProblem& p) {
  size_t next = cache_index;
  const auto read = [&](const char* name, size_t rank) {
    return read_input(context, next++, name, rank);
  };
  CacheInputs inputs{};
  inputs.cache = read("kv_cache", 5);
  if (scaled) inputs.scales = read("kv_scales", 4);
  const NamedTensor slots = read("slot_mapping", 1), tables = read("block_tables", 2);
  const NamedTensor starts = read("query_start_loc", 1), prefixes = read("prefix_offsets", 1);

  p.cache = inputs.cache.data;
  p.scales = inputs.scales.as<float>();
  p.slot_mapping = slots.as<const int32_t>();
  p.block_tables = tables.as<const int32_t>();
  p.query_start_loc = starts.as<const int32_t>();
  p.prefix_offsets = prefixes.as<const int32_t>();
  p.num_blocks = inputs.cache.dims[0];
  p.table_width = tables.dims[1];
  p.num_sequences = static_cast<int32_t>(tables.dims[0]);
  p.cache_size = static_cast<int32_t>(inputs.cache.dims[4]);
  p.block_size = static_cast<int32_t>(inputs.cache.dims[3]);
  read_attributes_of(attributes, p);

  check_heads(p);
  check_cache(p, inputs.cache);
  if (scaled) check_scales(inputs.scales, inputs.cache);
  expect(slots, 0, p.num_tokens, "one slot a token");
  expect(starts, 0, int64_t{p.num_sequences} + 1, "one more than block_tables has rows");
  expect(prefixes, 0, p.num_sequences, "one a row of block_tables");
  p.sinks = read_per_head(context, next++, "sinks", p.num_heads);
  p.alibi_slopes = read_per_head(context, next++, "alibi_slopes", p.num_heads);
  check_slots(p);
  check_query_start_loc(p);
  check_sequences(p);
  return inputs;
}

}  // namespace octavo
