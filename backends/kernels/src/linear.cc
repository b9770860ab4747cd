#include "linear.h"

#include <algorithm>
#include <cinttypes>
#include <vector>

#include "cpu_features.h"
#include "errors.h"
#include "linear_inputs.h"
#include "parallel.h"

namespace octavo {
namespace {

// Rows whose inputs stay in a second-level cache while the panels of a task go by.
constexpr int64_t kRowBlock = 192;
constexpr int64_t kRowMultiple = 8;  // of the tiles of most instruction sets
// Parts of the panels a thread: enough that the last one to finish keeps the others waiting for
// little.
constexpr int64_t kPartsPerThread = 2;
// The smallest parts, in panels of a single tile of rows and in groups of panels of several.
constexpr int64_t kSmallestPartOfOneTile = 8;
constexpr int64_t kSmallestPart = 3;
// Multiply-adds below which waking another thread costs more than it saves.
constexpr int64_t kSmallestTask = 1 << 15;

const LinearKernel& kernel_for(InstructionSet set) {
#if defined(OCTAVO_KERNELS_LANES16)
  static_cast<void>(set);
  return linear_lanes16();
#else
#if defined(__x86_64__)
  if (set == InstructionSet::kAvx512) return linear_avx512();
  if (set == InstructionSet::kAvx2) return linear_avx2();
#endif
  static_cast<void>(set);
  return linear_portable();
#endif
}

LinearProblem read_problem(const Context& context, int64_t columns) {
  const Tensor input = read_tensor(context, 0, "input", 2);
  const Tensor weight = read_tensor(context, 1, "weight", 3);
  const int64_t panels = divide_up(columns, kPanel);
  if (weight.dims[0] != panels || weight.dims[1] != input.dims[1] || weight.dims[2] != kPanel)
    refuse("weight is [%" PRId64 ", %" PRId64 ", %" PRId64 "] and has to be [%" PRId64 ", %" PRId64
           ", %d] for %" PRId64 " columns; pack it again",
           weight.dims[0], weight.dims[1], weight.dims[2], panels, input.dims[1], kPanel, columns);
  LinearProblem problem{};
  problem.input = input.as<const float>();
  problem.weight = weight.as<const float>();
  problem.bias = read_per_column(context, 2, "bias", columns);
  problem.residual = read_residual(context, 3, input.dims[0], columns);
  problem.rows = input.dims[0];
  problem.columns = columns;
  problem.depth = input.dims[1];
  return problem;
}

// How the panels are cut in parts: at multiples of `unit` panels.
struct PanelSplit {
  int64_t unit;
  int64_t units;
  int64_t parts;
};

PanelSplit split_panels(const LinearProblem& p, const LinearKernel& kernel) {
  const auto threads = static_cast<int64_t>(hardware_threads());
  const int64_t panels = divide_up(p.columns, kPanel);
  // A single tile of rows reads its weights at the memory's pace, and equal parts are what counts.
  const bool one_tile = p.rows <= kernel.max_tile_rows;
  const int64_t unit = one_tile ? 1 : kernel.panels_at_once(std::min(p.rows, kRowBlock));
  const int64_t units = divide_up(panels, unit);
  // A part that is too small has hardly begun to fetch ahead when it ends.
  const int64_t smallest = one_tile ? kSmallestPartOfOneTile : kSmallestPart;
  const int64_t wanted = threads * std::clamp<int64_t>(units / (threads * smallest), 1,
                                                       kPartsPerThread);
  const int64_t worthwhile = p.rows * p.depth * panels * kPanel / kSmallestTask;
  return {unit, units, std::clamp<int64_t>(std::min(wanted, worthwhile), 1, units)};
}

// Every task has its own part of the output, so the split changes no bit of it.
std::vector<LinearTask> split(const LinearProblem& p, const LinearKernel& kernel) {
  std::vector<LinearTask> tasks;
  if (p.rows == 0) return tasks;
  const PanelSplit s = split_panels(p, kernel);
  const int64_t panels = divide_up(p.columns, kPanel);
  const int64_t rows_a_task = 
      divide_up(divide_up(p.rows, divide_up(p.rows, kRowBlock)), kRowMultiple) * kRowMultiple;
  // Neighbouring tasks share their weights, the larger part of what has to come from memory.
  for (int64_t part = 0; part < s.parts; ++part)
    for (int64_t row = 0; row < p.rows; row += rows_a_task)
      tasks.push_back({row, std::min(row + rows_a_task, p.rows), s.units * part / s.parts * s.unit,
                       std::min(s.units * (part + 1) / s.parts * s.unit, panels)});
  return tasks;
}

}  // namespace

Linear::Linear(const Attributes& attributes)
    : columns_(attributes.get_or<int64_t>("columns", 0)),
      kernel_(kernel_for(selected_instruction_set())) {
  if (columns_ < 1) refuse("columns is %" PRId64 " and has to be at least 1", columns_);
}

void Linear::compute(const Context& context) const {
  LinearProblem problem = read_problem(context, columns_);
  const int64_t dims[] = {problem.rows, problem.columns};
  problem.output = static_cast<float*>(context.output(0, dims, 2));
  const std::vector<LinearTask> tasks = split(problem, kernel_);
  parallel_for(context, tasks.size(), [&](size_t i) { kernel_.compute(problem, tasks[i]); });
}

}  // namespace octavo
