#include "rowwise.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>

#include "cpu_features.h"
#include "errors.h"
#include "parallel.h"

namespace octavo {
namespace {

// Elements below which waking another thread costs more than it saves: a few microseconds' work.
constexpr int64_t kSmallestTask = 1 << 14;
constexpr int64_t kTasksPerThread = 4;
constexpr int64_t kLastFunction = static_cast<int64_t>(ActivationFunction::kReluSquared);

const RowwiseKernel& kernel_for(InstructionSet set) {
#if defined(OCTAVO_KERNELS_LANES16)
  static_cast<void>(set);
  return rowwise_lanes16();
#else
#if defined(__x86_64__)
  if (set == InstructionSet::kAvx512) return rowwise_avx512();
  if (set == InstructionSet::kAvx2) return rowwise_avx2();
#endif
  static_cast<void>(set);
  return rowwise_portable();
#endif
}

bool read_flag(const Attributes& attributes, const char* name) {
  const int64_t value = attributes.get_or(name, int64_t{0});
  if (value != 0 && value != 1) refuse("%s is %" PRId64 " and has to be 0 or 1", name, value);
  return value == 1;
}

Tensor read(const Context& context, size_t index, const char* name, size_t rank) {
  const Tensor tensor = context.input(index);
  if (tensor.rank != rank)
    refuse("%s has %zu dimensions and needs %zu; reshape it before the op", name, tensor.rank,
           rank);
  return tensor;
}

// [K], or null where it is [0].
const float* read_columns(const Context& context, size_t index, const char* name, int64_t depth) {
  const Tensor tensor = read(context, index, name, 1);
  if (tensor.dims[0] == 0) return nullptr;
  if (tensor.dims[0] != depth)
    refuse("%s has %" PRId64 " elements and the input %" PRId64
           " columns; give it one a column, or none",
           name, tensor.dims[0], depth);
  return tensor.as<const float>();
}

// [M, K], or null where it is [0, 0].
const float* read_residual(const Context& context, size_t index, const Tensor& input) {
  const Tensor tensor = read(context, index, "residual", 2);
  if (tensor.dims[0] == 0 && tensor.dims[1] == 0) return nullptr;
  if (tensor.dims[0] != input.dims[0] || tensor.dims[1] != input.dims[1])
    refuse("residual is [%" PRId64 ", %" PRId64 "] and the input [%" PRId64 ", %" PRId64
           "]; give it the input's shape, or [0, 0] for none",
           tensor.dims[0], tensor.dims[1], input.dims[0], input.dims[1]);
  return tensor.as<const float>();
}

RowOutput float_output(const Context& context, int64_t rows, int64_t depth) {
  const int64_t dims[] = {rows, depth};
  RowOutput output{};
  output.values = static_cast<float*>(context.output(0, dims, 2));
  return output;
}

RowOutput quantized_output(const Context& context, int64_t rows, int64_t depth) {
  const int64_t groups = (depth + kQuantizationGroup - 1) / kQuantizationGroup;
  const int64_t padded = groups * kQuantizationGroup;
  const int64_t values[] = {rows, padded}, for_groups[] = {rows, groups};
  RowOutput output{};
  output.quantized = static_cast<int8_t*>(context.output(0, values, 2));
  output.scales = static_cast<float*>(context.output(1, for_groups, 2));
  output.sums = static_cast<int32_t*>(context.output(2, for_groups, 2));
  return output;
}

// Few rows are done by the calling thread. Any split gives the same bits.
template <class Problem>
void for_rows(const Context& context, const Problem& problem,
              void (*compute)(const Problem&, RowRange)) {
  const int64_t most = kTasksPerThread * static_cast<int64_t>(hardware_threads());
  const int64_t worthwhile = problem.rows * problem.depth / kSmallestTask;
  const int64_t tasks = std::clamp<int64_t>(std::min(worthwhile, problem.rows), 1, most);
  if (tasks == 1) return compute(problem, {0, problem.rows});
  parallel_for(context, static_cast<size_t>(tasks), [&](size_t i) {
    const auto task = static_cast<int64_t>(i);
    compute(problem, {problem.rows * task / tasks, problem.rows * (task + 1) / tasks});
  });
}

}  // namespace

Quantize::Quantize(const Attributes&) : kernel_(kernel_for(selected_instruction_set())) {}

void Quantize::compute(const Context& context) const {
  const Tensor input = read(context, 0, "input", 2);
  QuantizeProblem problem{};
  problem.input = input.as<const float>();
  problem.rows = input.dims[0];
  problem.depth = input.dims[1];
  problem.output = quantized_output(context, problem.rows, problem.depth);
  for_rows(context, problem, kernel_.quantize);
}

NormBase::NormBase(const Attributes& attributes)
    : kernel_(kernel_for(selected_instruction_set())),
      epsilon_(attributes.get_or("epsilon", std::nanf(""))),
      centered_(read_flag(attributes, "centered")) {
  if (!(epsilon_ >= 0.0f && std::isfinite(epsilon_)))
    refuse("epsilon is %g and has to be finite and not negative; set it to the model's",
           static_cast<double>(epsilon_));
}

void NormBase::compute(const Context& context, bool quantized) const {
  const Tensor input = read(context, 0, "input", 2);
  NormProblem problem{};
  problem.input = input.as<const float>();
  problem.rows = input.dims[0];
  problem.depth = input.dims[1];
  problem.residual = read_residual(context, 1, input);
  problem.weight = read_columns(context, 2, "weight", problem.depth);
  problem.bias = read_columns(context, 3, "bias", problem.depth);
  problem.epsilon = epsilon_;
  problem.centered = centered_;
  problem.output = quantized ? quantized_output(context, problem.rows, problem.depth)
                             : float_output(context, problem.rows, problem.depth);
  const int64_t sum_dims[] = {problem.residual == nullptr ? 0 : problem.rows, problem.depth};
  problem.sum = static_cast<float*>(context.output(quantized ? 3 : 1, sum_dims, 2));
  for_rows(context, problem, kernel_.norm);
}

ActivateBase::ActivateBase(const Attributes& attributes)
    : kernel_(kernel_for(selected_instruction_set())), gated_(read_flag(attributes, "gated")) {
  const int64_t function = attributes.get_or<int64_t>("function", -1);
  if (function < 0 || function > kLastFunction)
    refuse("function is %" PRId64 " and has to lie in 0 to %" PRId64
           "; see the enumeration of graphs/ops/activation.py",
           function, kLastFunction);
  function_ = static_cast<ActivationFunction>(function);
}

void ActivateBase::compute(const Context& context, bool quantized) const {
  const Tensor input = read(context, 0, "input", 2);
  if (gated_ && input.dims[1] % 2 != 0)
    refuse("input has %" PRId64
           " columns and a gated activation needs an even number: gates, then factors",
           input.dims[1]);
  ActivateProblem problem{};
  problem.input = input.as<const float>();
  problem.rows = input.dims[0];
  problem.depth = gated_ ? input.dims[1] / 2 : input.dims[1];
  problem.function = function_;
  problem.gated = gated_;
  problem.output = quantized ? quantized_output(context, problem.rows, problem.depth)
                             : float_output(context, problem.rows, problem.depth);
  for_rows(context, problem, kernel_.activate);
}

}  // namespace octavo
