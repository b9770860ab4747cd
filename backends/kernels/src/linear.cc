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

// Rows whose inputs stay in a second-level cache while the panels of a task go by; a multiple of
// every tile's height.
constexpr int64_t kRowBlock = 192;
// Tasks a thread: enough that the last one to finish keeps the others waiting for little.
constexpr int64_t kTasksPerThread = 8;
// Multiply-adds below which waking another thread costs more than it saves.
constexpr int64_t kSmallestTask = 1 << 15;

LinearKernel kernel_for(InstructionSet set) {
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

// Every task has its own part of the output, so the split changes no bit of it.
std::vector<LinearTask> split(const LinearProblem& p) {
  const int64_t panels = divide_up(p.columns, kPanel), row_blocks = divide_up(p.rows, kRowBlock);
  const int64_t work = std::max<int64_t>(std::min(p.rows, kRowBlock) * p.depth * kPanel, 1);
  const int64_t wanted = kTasksPerThread * static_cast<int64_t>(hardware_threads());
  const int64_t panels_a_task = std::max({int64_t{1}, divide_up(panels * row_blocks, wanted),
                                          divide_up(kSmallestTask, work)});
  std::vector<LinearTask> tasks;
  // Neighbouring tasks share their weights, the larger part of what has to come from memory.
  for (int64_t panel = 0; panel < panels; panel += panels_a_task)
    for (int64_t row = 0; row < p.rows; row += kRowBlock)
      tasks.push_back({row, std::min(row + kRowBlock, p.rows), panel,
                       std::min(panel + panels_a_task, panels)});
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
  const std::vector<LinearTask> tasks = split(problem);
  parallel_for(context, tasks.size(), [&](size_t i) { kernel_(problem, tasks[i]); });
}

}  // namespace octavo
