#include "paged_attention_run.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "cpu_features.h"
#include "paged_attention_plan.h"
#include "parallel.h"

namespace octavo {
namespace {

// Calls task(0..count-1), on the calling thread alone where waking others does not pay.
template <class Task>
void run_tasks(const Context& context, size_t count, bool share, const Task& task) {
  if (share)
    parallel_for(context, count, task);
  else
    for (size_t i = 0; i < count; ++i) task(i);
}

void write_cache(const Context& context, const AttentionProblem& p,
                 const AttentionKernel& kernel) {
  constexpr int64_t kTokensPerTask = 16, kWorthSharing = 64;
  const int64_t chunks = (p.num_tokens + kTokensPerTask - 1) / kTokensPerTask;
  const auto tasks = static_cast<size_t>(chunks * p.num_kv_heads);
  run_tasks(context, tasks, p.num_tokens * p.num_kv_heads > kWorthSharing, [&](size_t task) {
    const auto kv_head = static_cast<int32_t>(static_cast<int64_t>(task) % p.num_kv_heads);
    const int64_t first = static_cast<int64_t>(task) / p.num_kv_heads * kTokensPerTask;
    const int64_t last = std::min(first + kTokensPerTask, p.num_tokens);
    for (int64_t token = first; token < last; ++token) kernel.write_token(p, token, kv_head);
  });
}

// The last of a split tile's tasks to finish merges what all of them found.
void attend_part(const AttentionProblem& p, const AttentionKernel& kernel,
                 const AttentionTask& task, SplitTile& split, float* partials, float* scratch) {
  float* const all = partials + split.offset;
  const int64_t size = partial_result_floats(p, task.tile.num_rows);
  kernel.attend_segments(p, task.tile, task.first_segment, task.last_segment,
                         all + (task.first_segment - split.first_segment) * size, scratch);
  const int64_t done = task.last_segment - task.first_segment;
  const std::atomic_ref<int64_t> remaining(split.remaining_segments);
  if (remaining.fetch_sub(done, std::memory_order_acq_rel) == done)
    kernel.merge_segments(p, task.tile, all, split.num_segments);
}

void attend(const Context& context, const AttentionProblem& p, const AttentionKernel& kernel) {
  thread_local AttentionPlan kept_plan;
  thread_local Scratch partial_scratch;
  AttentionPlan& plan = kept_plan;  // the calling thread's, on every thread
  const bool share = worth_sharing(p);
  plan_attention(p, kernel, share ? hardware_threads() : 1, plan);
  float* const partials = partial_scratch.floats(plan.partial_floats);
  const auto scratch_floats = static_cast<size_t>(kernel.scratch_size(p, plan.max_rows));
  run_tasks(context, plan.tasks.size(), share, [&](size_t i) {
    const AttentionTask& task = plan.tasks[i];
    thread_local Scratch task_scratch;
    float* const scratch = task_scratch.floats(scratch_floats);
    if (task.split < 0)
      kernel.attend_tile(p, task.tile, scratch);
    else
      attend_part(p, kernel, task, plan.splits[static_cast<size_t>(task.split)], partials,
                  scratch);
  });
}

}  // namespace

const AttentionKernel& attention_kernel() {
  const InstructionSet set = selected_instruction_set();
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

void* changed_output(const Context& context, size_t index, const Tensor& input,
                     size_t element_size) {
  void* const output = context.output(index, input.dims, input.rank);
  if (output == input.data) return output;
  size_t bytes = element_size;
  for (size_t i = 0; i < input.rank; ++i) bytes *= static_cast<size_t>(input.dims[i]);
  if (bytes > 0) std::memcpy(output, input.data, bytes);
  return output;
}

void write_and_attend(const Context& context, const AttentionProblem& p,
                      const AttentionKernel& kernel) {
  if (p.num_tokens == 0) return;
  write_cache(context, p, kernel);
  attend(context, p, kernel);
}

}  // namespace octavo
