// Adapts a kernel class (kernel_host.h) to an operator of PyTorch with a boxed function.
//
// The operator takes the kernel's inputs, then its attributes; it returns the outputs that are not
// made in place.
#pragma once

#include <algorithm>
#include <cstring>
#include <exception>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "errors.h"
#include "kernel_host.h"
#include "torch_abi.h"

namespace octavo {

struct TorchAttribute {
  std::string name;
  bool is_float;
};

// What the last failed operator of this thread threw: PyTorch keeps it from compiled callers.
inline thread_local std::string torch_error;

inline void check_torch(torch::Status status, const char* what) {
  if (status != 0) refuse("PyTorch failed to %s", what);
}

inline int32_t torch_dtype(ElementType type) {
  switch (type) {
    case ElementType::kFloat: return torch::abi.dtype_float32();
    case ElementType::kUint8: return torch::abi.dtype_uint8();
    case ElementType::kInt8: return torch::abi.dtype_int8();
    case ElementType::kInt32: return torch::abi.dtype_int32();
    case ElementType::kInt64: return torch::abi.dtype_int64();
    case ElementType::kFloat16: return torch::abi.dtype_float16();
    case ElementType::kDouble: return torch::abi.dtype_float64();
  }
  refuse("a kernel has a type that PyTorch's adapter does not know");
}

class TorchAttributes final : public Attributes {
 public:
  TorchAttributes(const std::vector<TorchAttribute>& declared, const torch::StableValue* values)
      : declared_(declared), values_(values) {}

  bool find(const char* name, int64_t* value) const override {
    const torch::StableValue* found = lookup(name, false);
    if (found != nullptr) std::memcpy(value, found, sizeof(*value));
    return found != nullptr;
  }

  bool find(const char* name, float* value) const override {
    const torch::StableValue* found = lookup(name, true);
    if (found == nullptr) return false;
    double wide;
    std::memcpy(&wide, found, sizeof(wide));
    *value = static_cast<float>(wide);
    return true;
  }

 private:
  const torch::StableValue* lookup(const char* name, bool is_float) const {
    for (size_t i = 0; i < declared_.size(); ++i)
      if (declared_[i].is_float == is_float && declared_[i].name == name) return values_ + i;
    return nullptr;
  }

  const std::vector<TorchAttribute>& declared_;
  const torch::StableValue* values_;
};

// Owns the inputs, whose handles a boxed function is given, and the outputs until they are taken.
template <class Kernel>
class TorchContext final : public Context {
 public:
  explicit TorchContext(const torch::StableValue* stack) {
    for (size_t i = 0; i < kInputs; ++i)
      inputs_[i] = reinterpret_cast<torch::TensorHandle>(stack[i]);
  }
  TorchContext(const TorchContext&) = delete;
  TorchContext& operator=(const TorchContext&) = delete;
  ~TorchContext() {
    for (const torch::TensorHandle handle : inputs_) torch::abi.delete_tensor(handle);
    for (const torch::TensorHandle handle : outputs_)
      if (handle != nullptr) torch::abi.delete_tensor(handle);
  }

  Tensor input(size_t index) const override {
    const torch::TensorHandle handle = inputs_[index];
    int32_t dtype = 0;
    int64_t rank = 0;
    check_torch(torch::abi.get_dtype(handle, &dtype), "tell a tensor's dtype");
    if (dtype != torch_dtype(Kernel::kInputTypes[index]))
      refuse("input %zu of %s has another dtype than its schema says", index, Kernel::kName);
    check_torch(torch::abi.get_dim(handle, &rank), "tell a tensor's rank");
    if (rank > static_cast<int64_t>(kMaxRank))
      refuse("input %zu has %lld dimensions, more than %zu", index, static_cast<long long>(rank),
             kMaxRank);
    Tensor tensor{};
    tensor.rank = static_cast<size_t>(rank);
    int64_t *sizes = nullptr, *strides = nullptr;
    check_torch(torch::abi.get_sizes(handle, &sizes), "tell a tensor's sizes");
    check_torch(torch::abi.get_strides(handle, &strides), "tell a tensor's strides");
    std::copy_n(sizes, tensor.rank, tensor.dims);
    if (!is_contiguous(tensor, strides))
      refuse("input %zu of %s is not contiguous; call contiguous() before the operator", index,
             Kernel::kName);
    check_torch(torch::abi.get_data_ptr(handle, &tensor.data), "tell where a tensor is");
    return tensor;
  }

  void* output(size_t index, const int64_t* dims, size_t rank) const override {
    void* data = nullptr;
    const int in_place = in_place_input(index);
    if (in_place >= 0) {
      check_torch(torch::abi.get_data_ptr(inputs_[in_place], &data), "tell where a tensor is");
      return data;
    }
    int64_t strides[kMaxRank];
    int64_t stride = 1;
    for (size_t i = rank; i-- > 0; stride *= dims[i]) strides[i] = stride;
    check_torch(torch::abi.empty_strided(static_cast<int64_t>(rank), dims, strides,
                                         torch_dtype(Kernel::kOutputTypes[index]),
                                         torch::abi.device_type_cpu(), 0, &outputs_[index]),
                "allocate an output");
    check_torch(torch::abi.get_data_ptr(outputs_[index], &data), "tell where a tensor is");
    return data;
  }

  void share(void (*work)(void*, size_t), size_t count, void* user) const override {
    struct Shared {
      void (*work)(void*, size_t);
      void* user;
    } shared{work, user};
    uint32_t threads = 1;
    check_torch(torch::abi.get_num_threads(&threads), "tell its number of threads");
    const auto workers = static_cast<int64_t>(std::min(count, size_t{std::max(threads, 1u)}));
    const auto run = [](int64_t begin, int64_t, void* raw) {
      const auto& s = *static_cast<const Shared*>(raw);
      s.work(s.user, static_cast<size_t>(begin));
    };
    check_torch(torch::abi.parallel_for(0, workers, 1, run, &shared), "share work among threads");
  }

  // Moves the outputs that are not in place to the stack.
  void give(torch::StableValue* stack) {
    for (size_t i = 0, place = 0; i < kOutputs; ++i) {
      if (in_place_input(i) >= 0) continue;
      stack[place++] = reinterpret_cast<torch::StableValue>(outputs_[i]);
      outputs_[i] = nullptr;
    }
  }

  static constexpr size_t kInputs = std::size(Kernel::kInputTypes);
  static constexpr size_t kOutputs = std::size(Kernel::kOutputTypes);

 private:
  static int in_place_input(size_t output) {
    if constexpr (requires { Kernel::kInPlaceInputs; })
      for (size_t i = 0; i < std::size(Kernel::kInPlaceOutputs); ++i)
        if (Kernel::kInPlaceOutputs[i] == static_cast<int>(output)) return Kernel::kInPlaceInputs[i];
    return -1;
  }

  // Strides of dimensions of one element, or of tensors of none, do not matter.
  static bool is_contiguous(const Tensor& tensor, const int64_t* strides) {
    if (std::find(tensor.dims, tensor.dims + tensor.rank, 0) != tensor.dims + tensor.rank)
      return true;
    int64_t expected = 1;
    for (size_t i = tensor.rank; i-- > 0; expected *= tensor.dims[i])
      if (tensor.dims[i] != 1 && strides[i] != expected) return false;
    return true;
  }

  torch::TensorHandle inputs_[kInputs]{};
  mutable torch::TensorHandle outputs_[kOutputs]{};
};

template <class Kernel>
struct TorchOpFor {
  inline static std::vector<TorchAttribute> attributes;

  static void run(torch::StableValue* stack, uint64_t, uint64_t) {
    TorchContext<Kernel> context(stack);
    try {
      const Kernel kernel(TorchAttributes(attributes, stack + TorchContext<Kernel>::kInputs));
      kernel.compute(context);
    } catch (const std::exception& error) {
      torch_error = error.what();
      throw std::runtime_error(error.what());
    }
    context.give(stack);
  }
};

}  // namespace octavo
