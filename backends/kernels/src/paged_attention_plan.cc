#include "paged_attention_plan.h"

#include <algorithm>

namespace octavo {
namespace {

// Queries, sums and the keys and values of a sub-block of a tile this high stay in a second-level
// cache of 512 KiB for head sizes up to 256.
constexpr int64_t kMaxTileRows = 96;
// Tasks a thread below which the last one to finish keeps the others waiting too long.
constexpr int64_t kTasksPerThread = 4;
// Higher tiles are cut by rows, not by keys: their partial results would outgrow the caches.
constexpr int64_t kMaxSplitRows = 32;
constexpr size_t kMaxPartialFloats = size_t{16} << 20;

// Multiply-adds that one thread does in about 3 microseconds.
constexpr int64_t kWorthSharing = 100'000;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t num_rows(const AttentionProblem& p, int32_t sequence) {
  const int64_t queries = p.query_start_loc[sequence + 1] - p.query_start_loc[sequence];
  return queries * (p.num_heads / p.num_kv_heads);
}

int64_t num_tiles(const AttentionProblem& p, int64_t tile_rows) {
  int64_t tiles = 0;
  for (int32_t b = 0; b < p.num_sequences; ++b) tiles += divide_up(num_rows(p, b), tile_rows);
  return tiles * p.num_kv_heads;
}

// The highest tile that still gives every thread enough of them.
int64_t choose_tile_rows(const AttentionProblem& p, const AttentionKernel& kernel,
                         int64_t wanted_tasks) {
  const int64_t multiple = kernel.row_multiple;
  int64_t rows = kMaxTileRows / multiple * multiple;
  while (rows > 4 * multiple && num_tiles(p, rows) < wanted_tasks)
    rows = divide_up(rows / 2, multiple) * multiple;
  return rows;
}

KeyRange keys_of(const AttentionProblem& p, const RowTile& tile) {
  return {visible_keys(p, tile.sequence, tile.first_row).first,
          visible_keys(p, tile.sequence, tile.first_row + tile.num_rows - 1).last};
}

AttentionTask whole_tile(const AttentionProblem& p, const RowTile& tile) {
  const KeyRange keys = keys_of(p, tile);
  return {tile, keys.first / kSegment, divide_up(keys.last, kSegment), -1,
          tile.num_rows * (keys.last - keys.first)};
}

void split(const AttentionProblem& p, const AttentionTask& whole, int64_t pieces,
           AttentionPlan& plan) {
  const int64_t segments = whole.last_segment - whole.first_segment;
  const int64_t index = static_cast<int64_t>(plan.splits.size());
  plan.splits.push_back({whole.first_segment, segments, segments, plan.partial_floats});
  plan.partial_floats +=
      static_cast<size_t>(segments * partial_result_floats(p, whole.tile.num_rows));
  for (int64_t i = 0; i < pieces; ++i) {
    AttentionTask part = whole;
    part.first_segment = whole.first_segment + segments * i / pieces;
    part.last_segment = whole.first_segment + segments * (i + 1) / pieces;
    part.split = index;
    part.cost = whole.cost * (part.last_segment - part.first_segment) / segments;
    plan.tasks.push_back(part);
  }
}

void add(const AttentionProblem& p, const AttentionTask& whole, int64_t wanted_cost,
         AttentionPlan& plan) {
  const int64_t segments = whole.last_segment - whole.first_segment;
  const int64_t cost = std::max<int64_t>(wanted_cost, 1);
  const int64_t pieces = std::min(segments, divide_up(whole.cost, cost));
  const size_t floats =
      static_cast<size_t>(segments * partial_result_floats(p, whole.tile.num_rows));
  if (pieces > 1 && whole.tile.num_rows <= kMaxSplitRows &&
      plan.partial_floats + floats <= kMaxPartialFloats)
    split(p, whole, pieces, plan);
  else
    plan.tasks.push_back(whole);
}

void whole_tiles(const AttentionProblem& p, int64_t tile_rows, std::vector<AttentionTask>& tiles) {
  tiles.clear();
  for (int32_t b = 0; b < p.num_sequences; ++b) {
    const int64_t rows = num_rows(p, b);
    for (int64_t first = 0; first < rows; first += tile_rows)
      for (int32_t head = 0; head < p.num_kv_heads; ++head) {
        const auto height = static_cast<int32_t>(std::min(tile_rows, rows - first));
        tiles.push_back(whole_tile(p, {b, head, first, height}));
      }
  }
}

}  // namespace

bool worth_sharing(const AttentionProblem& p) {
  int64_t multiply_adds = 0;
  for (int32_t b = 0; b < p.num_sequences && multiply_adds < kWorthSharing; ++b) {
    const int64_t rows = num_rows(p, b);
    if (rows == 0) continue;
    const KeyRange keys = visible_keys(p, b, rows - 1);
    multiply_adds +=
        rows * p.num_kv_heads * (keys.last - keys.first) * (p.key_size + p.value_size);
  }
  return multiply_adds >= kWorthSharing;
}

void plan_attention(const AttentionProblem& p, const AttentionKernel& kernel, size_t threads,
                    AttentionPlan& plan) {
  plan.tasks.clear();
  plan.splits.clear();
  plan.partial_floats = 0;
  plan.max_rows = 0;
  const int64_t wanted_tasks = kTasksPerThread * static_cast<int64_t>(threads);
  whole_tiles(p, choose_tile_rows(p, kernel, wanted_tasks), plan.tiles);
  int64_t total_cost = 0;
  for (const AttentionTask& tile : plan.tiles) {
    total_cost += tile.cost;
    plan.max_rows = std::max(plan.max_rows, tile.tile.num_rows);
  }
  // With one thread there is nobody to share a tile with.
  const int64_t wanted_cost = threads > 1 ? total_cost / wanted_tasks : total_cost;
  for (const AttentionTask& tile : plan.tiles) add(p, tile, wanted_cost, plan);
  std::sort(plan.tasks.begin(), plan.tasks.end(),
            [](const AttentionTask& a, const AttentionTask& b) { return a.cost > b.cost; });
}

}  // namespace octavo
