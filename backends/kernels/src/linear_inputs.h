// What the checks and task splits of all linear layers share.
#pragma once

#include <cinttypes>
#include <cstddef>
#include <cstdint>

#include "kernel_host.h"
#include "errors.h"

namespace octavo {

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline Tensor read_tensor(const Context& context, size_t index, const char* name, size_t rank) {
  const Tensor tensor = context.input(index);
  if (tensor.rank != rank)
    refuse("%s has %zu dimensions and needs %zu; reshape it before the op", name, tensor.rank,
           rank);
  return tensor;
}

// [columns] floats, or null where the tensor is [0].
inline const float* read_per_column(const Context& context, size_t index, const char* name,
                                    int64_t columns) {
  const Tensor tensor = read_tensor(context, index, name, 1);
  if (tensor.dims[0] == 0) return nullptr;
  if (tensor.dims[0] != columns)
    refuse("%s has %" PRId64 " elements and has to have %" PRId64 ", or 0 for none", name,
           tensor.dims[0], columns);
  return tensor.as<const float>();
}

// [rows, columns] floats to add to the output, or null where the tensor is [0, 0].
inline const float* read_residual(const Context& context, size_t index, int64_t rows,
                                  int64_t columns) {
  const Tensor tensor = read_tensor(context, index, "residual", 2);
  if (tensor.dims[0] == 0 && tensor.dims[1] == 0) return nullptr;
  if (tensor.dims[0] != rows || tensor.dims[1] != columns)
    refuse("residual is [%" PRId64 ", %" PRId64 "] and has to be [%" PRId64 ", %" PRId64
           "] like the output, or [0, 0] for none",
           tensor.dims[0], tensor.dims[1], rows, columns);
  return tensor.as<const float>();
}

}  // namespace octavo
