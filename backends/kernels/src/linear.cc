#include "linear.h"

#include <algorithm>
#include <cinttypes>
#include <vector>

#include "cpu_features.h"
#include "errors.h"
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

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

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

Tensor read(const Context& context, size_t index, const char* name, size_t rank) {
  const Tensor tensor = context.input(index);
  if (tensor.rank != rank)
    refuse("%s has %zu dimensions and needs %zu; reshape it before the op", name, tensor.rank,
           rank);
  return tensor;
}

// [M, N], or null where it is [0, 0].
const float* read_residual(const Context& context, int64_t rows, int64_t columns) {
  const Tensor residual = read(context, 3, "residual", 2);
  if (residual.dims[0] == 0 && residual.dims[1] == 0) return nullptr;
  if (residual.dims[0] != rows || residual.dims[1] != columns)
    refuse("residual is [%" PRId64 ", %" PRId64 "] and the output [%" PRId64 ", %" PRId64
           "]; give it the output's shape, or [0, 0] for none",
           residual.dims[0], residual.dims[1], rows, columns);
  return residual.as<const float>();
}

LinearProblem read_problem(const Context& context, int64_t columns) {
  const Tensor input = read(context, 0, "input", 2), weight = read(context, 1, "weight", 3);
  const Tensor bias = read(context, 2, "bias", 1);
  const int64_t panels = divide_up(columns, kPanel);
  if (weight.dims[0] != panels || weight.dims[1] != input.dims[1] || weight.dims[2] != kPanel)
    refuse("weight is [%" PRId64 ", %" PRId64 ", %" PRId64 "] and has to be [%" PRId64 ", %" PRId64
           ", %d] for %" PRId64 " columns; pack it again",
           weight.dims[0], weight.dims[1], weight.dims[2], panels, input.dims[1], kPanel, columns);
  if (bias.dims[0] != 0 && bias.dims[0] != columns)
    refuse("bias has %" PRId64 " elements and has to have %" PRId64 ", or 0 for none",
           bias.dims[0], columns);
  LinearProblem problem{};
  problem.input = input.as<const float>();
  problem.weight = weight.as<const float>();
  problem.bias = bias.dims[0] == 0 ? nullptr : bias.as<const float>();
  problem.residual = read_residual(context, input.dims[0], columns);
  problem.rows = input.dims[0];
  problem.columns = columns;
  problem.depth = input.dims[1];
  return problem;
}

// How many parts the panels are cut in for one block of rows.
int64_t panel_parts(const LinearProblem& p, int64_t panels, int64_t row_blocks) {
  const auto threads = static_cast<int64_t>(hardware_threads());
  const int64_t work = p.rows * p.depth * panels * kPanel;
  const int64_t worthwhile = std::max<int64_t>(work / kSmallestTask / row_blocks, 1);
  const int64_t wanted = divide_up(kTasksPerThread, row_blocks) * threads;
  return std::min({worthwhile, wanted, panels});
}

// Every task has its own part of the output, so the split changes no bit of it.
std::vector<LinearTask> split(const LinearProblem& p, const LinearKernel& kernel) {
  const int64_t panels = divide_up(p.columns, kPanel), row_blocks = divide_up(p.rows, kRowBlock);
  if (row_blocks == 0) return {};
  // One row reads its weights at the memory's pace, and equal parts are what counts.
  const int64_t unit = p.rows == 1 ? 1 : kernel.panels_at_once(std::min(p.rows, kRowBlock));
  const int64_t units = divide_up(panels, unit);
  const int64_t parts = std::min(panel_parts(p, panels, row_blocks), units);
  std::vector<LinearTask> tasks;
  // Neighbouring tasks share their weights, the larger part of what has to come from memory.
  for (int64_t part = 0; part < parts; ++part)
    for (int64_t row = 0; row < p.rows; row += kRowBlock)
      tasks.push_back({row, std::min(row + kRowBlock, p.rows), units * part / parts * unit,
                       std::min(units * (part + 1) / parts * unit, panels)});
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
