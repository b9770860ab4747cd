#include "quantized_linear.h"

#include <algorithm>
#include <vector>

#include "cpu_features.h"
#include "errors.h"
#include "linear_inputs.h"
#include "parallel.h"

namespace octavo {
namespace {

// Multiply-adds that take as long as reading one byte of weights from memory.
constexpr int64_t kRowsAByte = 16;
// What a task costs at least, in bytes read: with less, waking a thread takes longer.
constexpr int64_t kSmallestTask = 1 << 16;

const QuantizedLinearKernel& kernel_for(CpuFeatures features) {
#if defined(OCTAVO_KERNELS_LANES16)
  static_cast<void>(features);
  return quantized_linear_lanes16();
#else
#if defined(__x86_64__)
  const bool vnni = features.integer_dot_products;
  if (features.set == InstructionSet::kAvx512)
    return vnni ? quantized_linear_avx512_vnni() : quantized_linear_avx512();
  if (features.set == InstructionSet::kAvx2)
    return vnni ? quantized_linear_avx2_vnni() : quantized_linear_avx2();
#endif
  static_cast<void>(features);
  return quantized_linear_portable();
#endif
}

Tensor read_groups(const Context& context, size_t index, const char* name,
                   const Tensor& quantized) {
  const Tensor tensor = read_tensor(context, index, name, 2);
  const int64_t rows = quantized.dims[0], groups = quantized.dims[1] / kGroup;
  if (tensor.dims[0] != rows || tensor.dims[1] != groups)
    refuse("%s is [%" PRId64 ", %" PRId64 "] and has to be [%" PRId64 ", %" PRId64
           "], one for every %d quantised values; take all three from one Quantize",
           name, tensor.dims[0], tensor.dims[1], rows, groups, kGroup);
  return tensor;
}

Tensor read_quantized(const Context& context) {
  const Tensor quantized = read_tensor(context, 0, "quantized", 2);
  if (quantized.dims[1] % kGroup != 0)
    refuse("quantized is %" PRId64 " wide and has to be a multiple of %d; fill it up with zeros",
           quantized.dims[1], kGroup);
  return quantized;
}

const uint8_t* read_weight(const Context& context, int64_t columns, int64_t depth, int bits) {
  const Tensor weight = read_tensor(context, 3, "weight", 4);
  const int64_t panels = divide_up(columns, kWeightPanel), steps = depth * bits / (8 * kDotDepth);
  if (weight.dims[0] != panels || weight.dims[1] != steps || weight.dims[2] != kWeightPanel ||
      weight.dims[3] != kDotDepth)
    refuse("weight is [%" PRId64 ", %" PRId64 ", %" PRId64 ", %" PRId64 "] and has to be [%" PRId64
           ", %" PRId64 ", %d, %d] for %" PRId64 " columns of %d bits and a depth of %" PRId64
           "; pack it again",
           weight.dims[0], weight.dims[1], weight.dims[2], weight.dims[3], panels, steps,
           kWeightPanel, kDotDepth, columns, bits, depth);
  return weight.as<const uint8_t>();
}

// Halves, one for each group of weights, or null where the tensor is [0, 0, 0].
const uint16_t* read_group_halves(const Context& context, size_t index, const char* name,
                                  int64_t columns, int64_t depth) {
  const Tensor tensor = read_tensor(context, index, name, 3);
  const int64_t panels = divide_up(columns, kWeightPanel), groups = depth / kGroup;
  if (tensor.dims[0] == 0 && tensor.dims[1] == 0 && tensor.dims[2] == 0) return nullptr;
  if (tensor.dims[0] != panels || tensor.dims[1] != groups || tensor.dims[2] != kWeightPanel)
    refuse("%s is [%" PRId64 ", %" PRId64 ", %" PRId64 "] and has to be [%" PRId64 ", %" PRId64
           ", %d], or [0, 0, 0] for none; pack it again",
           name, tensor.dims[0], tensor.dims[1], tensor.dims[2], panels, groups, kWeightPanel);
  return tensor.as<const uint16_t>();
}

void read_scales(const Context& context, QuantizedLinearProblem& p) {
  p.column_scales = read_per_column(context, 4, "column_scales", p.columns);
  p.group_scales = read_group_halves(context, 5, "group_scales", p.columns, p.depth);
  p.group_minimums = read_group_halves(context, 6, "group_minimums", p.columns, p.depth);
  if ((p.column_scales == nullptr) == (p.group_scales == nullptr))
    refuse("%s column_scales and group_scales are given; give one of the two and leave the other "
           "empty",
           p.column_scales == nullptr ? "neither" : "both");
  if (p.group_minimums != nullptr && p.group_scales == nullptr)
    refuse("group_minimums are given without group_scales; leave them empty, or give both");
}

// Room for what depends on the activations' sums alone.
struct Prepared {
  std::vector<int32_t> starts;
  std::vector<float> scaled_sums;
};

void make_room(QuantizedLinearProblem& p, Prepared& prepared) {
  const auto groups = static_cast<size_t>(p.rows * (p.depth / kGroup));
  if (prepared.starts.size() < groups) prepared.starts.resize(groups);
  p.starts = prepared.starts.data();
  if (p.group_minimums == nullptr) return;
  if (prepared.scaled_sums.size() < groups) prepared.scaled_sums.resize(groups);
  p.scaled_sums = prepared.scaled_sums.data();
}

// Every task has its own part of the output, so the split changes no bit of it.
std::vector<QuantizedLinearTask> split(const QuantizedLinearProblem& p) {
  const int64_t panels = divide_up(p.columns, kWeightPanel);
  const int64_t cost = std::max<int64_t>(
      p.depth * kWeightPanel * std::max(std::min<int64_t>(p.rows, kRowBlock), kRowsAByte) /
          kRowsAByte,
      1);
  const int64_t least = divide_up(kSmallestTask, cost);
  // A thread's share of what is left: tasks shrink towards the end, so that threads end together.
  const auto shares = static_cast<int64_t>(hardware_threads());
  std::vector<QuantizedLinearTask> tasks;
  for (int64_t panel = 0, last; panel < panels; panel = last) {
    last = std::min(panel + std::max(divide_up(panels - panel, shares), least), panels);
    // Neighbouring tasks share their weights, the larger part of what has to come from memory.
    for (int64_t row = 0; row < p.rows; row += kRowBlock)
      tasks.push_back({row, std::min(row + kRowBlock, p.rows), panel, last});
  }
  return tasks;
}

int checked(const Attributes& attributes, const char* name, int64_t least, int64_t most) {
  const auto value = attributes.get_or<int64_t>(name, -1);
  if (value < least || value > most)
    refuse("%s is %" PRId64 " and has to be %" PRId64 " to %" PRId64, name, value, least, most);
  return static_cast<int>(value);
}

}  // namespace

QuantizedLinear::QuantizedLinear(const Attributes& attributes)
    : columns_(attributes.get_or<int64_t>("columns", 0)),
      bits_(checked(attributes, "bits", 4, 8)),
      zero_point_(checked(attributes, "zero_point", 0, (1 << bits_) - 1)),
      kernel_(kernel_for(selected_features())) {
  if (columns_ < 1) refuse("columns is %" PRId64 " and has to be at least 1", columns_);
  if (bits_ != 4 && bits_ != 8) refuse("bits is %d and has to be 4 or 8", bits_);
}

void QuantizedLinear::compute(const Context& context) const {
  const Tensor quantized = read_quantized(context);
  QuantizedLinearProblem p{};
  p.quantized = quantized.as<const int8_t>();
  p.rows = quantized.dims[0];
  p.columns = columns_;
  p.depth = quantized.dims[1];
  p.bits = bits_;
  p.scales = read_groups(context, 1, "scales", quantized).as<const float>();
  p.sums = read_groups(context, 2, "sums", quantized).as<const int32_t>();
  p.zero_point = zero_point_;
  p.weight = read_weight(context, columns_, p.depth, bits_);
  read_scales(context, p);
  p.bias = read_per_column(context, 7, "bias", columns_);
  p.residual = read_residual(context, 8, p.rows, columns_);
  const int64_t dims[] = {p.rows, p.columns};
  p.output = static_cast<float*>(context.output(0, dims, 2));
  thread_local Prepared prepared;
  make_room(p, prepared);
  kernel_.prepare(p);
  const std::vector<QuantizedLinearTask> tasks = split(p);
  parallel_for(context, tasks.size(), [&](size_t i) {
    thread_local Scratch scratch;
    kernel_.compute(p, tasks[i], scratch.floats(size_t{kRowBlock} * kWeightPanel));
  });
}

}  // namespace octavo
