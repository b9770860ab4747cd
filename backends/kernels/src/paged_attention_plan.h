// How a step's rows and keys are divided into tasks.
//
// The division changes who computes what and when, never a result: the kernel cuts a row's
// arithmetic only at absolute key positions (see paged_attention_kernel.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "paged_attention_kernel.h"

namespace octavo {

// All keys of a tile, or, where `split` is not negative, the segments [first, last) of one.
struct AttentionTask {
  RowTile tile;
  int64_t first_segment;
  int64_t last_segment;
  int64_t split;  // index into SplitTile list
  int64_t cost;
};

struct SplitTile {
  int64_t first_segment;
  int64_t num_segments;
  int64_t remaining_segments;  // counted down by the tasks
  size_t offset;  // of its first partial result in the buffer of all, in floats
};

struct AttentionPlan {
  std::vector<AttentionTask> tiles;  // before some are split
  std::vector<AttentionTask> tasks;  // longest first
  std::vector<SplitTile> splits;
  size_t partial_floats = 0;  // what the partial results of all split tiles need
  int32_t max_rows = 0;
};

// Whether other threads would save more than waking them costs.
bool worth_sharing(const AttentionProblem& problem);

// Fills a plan that may have been used before, so that its memory is used again.
void plan_attention(const AttentionProblem& problem, const AttentionKernel& kernel, size_t threads,
                    AttentionPlan& plan);

}  // namespace octavo
