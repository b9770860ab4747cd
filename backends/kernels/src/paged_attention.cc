#include "paged_attention.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu_features.h"
#include "paged_attention_inputs.h"
#include "paged_attention_plan.h"
#include "parallel.h"

namespace octavo {
namespace {

const AttentionKernel& kernel_for(InstructionSet set) {
#if defined(OCTAVO_KERNELS_LANES16)
  static_cast<void>(set);
  return paged_attention_lanes16();
#else
#if defined(__x86_64__)
  if (set == InstructionSet::kAvx512) return paged_attention_avx512();
  if (set == InstructionSet::kAvx2) return paged_attention_avx2();
#endif
  static_cast<void>(set);
  return paged_attention_portable();
#endif
}

// Keys go in as columns: element d of the token at offset o is at [d][o] of its block.
void write_token(const AttentionProblem& p, int64_t token, int32_t kv_head) {
  const int32_t slot = p.slot_mapping[token];
  if (slot < 0) return;
  const int64_t block = slot / p.block_size, offset = slot % p.block_size;
  const int64_t head_size = int64_t{p.block_size} * p.cache_size;
  float* heads = p.cache + 2 * block * p.num_kv_heads * head_size;
  float* keys = heads + kv_head * head_size + offset;
  float* values = heads + (p.num_kv_heads + kv_head) * head_size + offset * p.cache_size;
  const int64_t row = token * p.num_kv_heads + kv_head;
  const float* key = p.key + row * p.key_size;
  for (int32_t d = 0; d < p.key_size; ++d) keys[int64_t{d} * p.block_size] = key[d];
  std::memcpy(values, p.value + row * p.value_size, sizeof(float) * p.value_size);
}

void write_cache(const Context& context, const AttentionProblem& p) {
  constexpr int64_t kTokensPerTask = 64;
  const int64_t chunks = (p.num_tokens + kTokensPerTask - 1) / kTokensPerTask;
  const auto write = [&](size_t task) {
    const auto kv_head = static_cast<int32_t>(static_cast<int64_t>(task) % p.num_kv_heads);
    const int64_t first = static_cast<int64_t>(task) / p.num_kv_heads * kTokensPerTask;
    const int64_t last = std::min(first + kTokensPerTask, p.num_tokens);
    for (int64_t token = first; token < last; ++token) write_token(p, token, kv_head);
  };
  const auto tasks = static_cast<size_t>(chunks * p.num_kv_heads);
  // Waking the pool costs more than writing a few tokens.
  if (chunks <= 1)
    for (size_t task = 0; task < tasks; ++task) write(task);
  else
    parallel_for(context, tasks, write);
}

// Lets the kernel leave or find a split tile's partial results.
std::vector<PartialResult> partial_results(const AttentionProblem& p, const SplitTile& split,
                                           float* partials, int64_t first, int64_t last) {
  const size_t size = partial_result_floats(p, split.tile.num_rows);
  std::vector<PartialResult> results;
  for (int64_t s = first; s < last; ++s) {
    float* at = partials + split.offset + static_cast<size_t>(s - split.first_segment) * size;
    results.push_back(partial_result_at(p, split.tile.num_rows, at));
  }
  return results;
}

void attend(const Context& context, const AttentionProblem& p, const AttentionKernel& kernel) {
  const AttentionPlan plan = plan_attention(p, kernel, hardware_threads());
  thread_local Scratch partial_scratch;
  float* const partials = partial_scratch.floats(plan.partial_floats);
  const auto scratch_floats = static_cast<size_t>(kernel.scratch_size(p, plan.max_rows));
  parallel_for(context, plan.tasks.size(), [&](size_t i) {
    const AttentionTask& task = plan.tasks[i];
    thread_local Scratch task_scratch;
    float* scratch = task_scratch.floats(scratch_floats);
    if (task.split < 0) {
      kernel.attend_tile(p, task.tile, scratch);
      return;
    }
    const SplitTile& split = plan.splits[static_cast<size_t>(task.split)];
    const auto results =
        partial_results(p, split, partials, task.first_segment, task.last_segment);
    kernel.attend_segments(p, task.tile, task.first_segment, task.last_segment, results.data(),
                           scratch);
  });
  parallel_for(context, plan.splits.size(), [&](size_t i) {
    const SplitTile& split = plan.splits[i];
    const auto results = partial_results(p, split, partials, split.first_segment,
                                         split.first_segment + split.num_segments);
    kernel.merge_segments(p, split.tile, results.data(), split.num_segments);
  });
}

}  // namespace

PagedAttention::PagedAttention(const Attributes& attributes)
    : attributes_(read_attributes(attributes)), kernel_(kernel_for(selected_instruction_set())) {}

void PagedAttention::compute(const Context& context) const {
  PagedAttentionInputs inputs = read_inputs(context, attributes_);
  AttentionProblem& p = inputs.problem;
  const int64_t output_dims[] = {p.num_tokens, p.num_heads, p.value_size};
  p.output = static_cast<float*>(context.output(0, output_dims, 3));
  float* cache = static_cast<float*>(context.output(1, inputs.cache.dims, inputs.cache.rank));
  // Bound to one buffer, as the runtime does it, input and output need no copy.
  if (cache != p.cache) {
    const int64_t count = p.num_blocks * 2 * p.num_kv_heads * p.block_size * p.cache_size;
    std::memcpy(cache, p.cache, sizeof(float) * static_cast<size_t>(count));
    p.cache = cache;
  }
  if (p.num_tokens == 0) return;
  write_cache(context, p);
  attend(context, p, kernel_);
}

}  // namespace octavo
