// Adapts a kernel class (kernel_host.h) to ONNX Runtime's C custom-op interface.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <iterator>
#include <new>

#include "errors.h"
#include "kernel_host.h"
#include "ort_abi.h"

namespace octavo {

class OrtAttributes final : public Attributes {
 public:
  explicit OrtAttributes(const ort::KernelInfo* info) : info_(info) {}

  bool find(const char* name, int64_t* value) const override { return read(name, value); }
  bool find(const char* name, float* value) const override { return read(name, value); }

 private:
  template <class T>
  bool read(const char* name, T* value) const {
    T found{};
    ort::Status* status = ort::kernel_info_get_attribute(info_, name, &found);
    if (status == nullptr) {
      *value = found;
      return true;
    }
    ort::release_status(status);
    return false;
  }

  const ort::KernelInfo* info_;
};

class OrtContext final : public Context {
 public:
  explicit OrtContext(ort::KernelContext* context) : context_(context) {}

  Tensor input(size_t index) const override {
    const ort::Value* value = nullptr;
    check(ort::kernel_context_get_input(context_, index, &value));
    if (value == nullptr) refuse("input %zu is missing; connect a tensor to it", index);
    Tensor tensor{};
    ElementType type{};
    const int64_t* dims = nullptr;
    check(ort::get_tensor_type_and_shape(value, &type, &dims, &tensor.rank));
    if (tensor.rank > kMaxRank)
      refuse("input %zu has %zu dimensions, more than %zu", index, tensor.rank, kMaxRank);
    std::copy_n(dims, tensor.rank, tensor.dims);
    // The C interface has no const accessor; inputs are not written through this pointer.
    check(ort::get_tensor_mutable_data(const_cast<ort::Value*>(value), &tensor.data));
    return tensor;
  }

  void* output(size_t index, const int64_t* dims, size_t rank) const override {
    ort::Value* value = nullptr;
    check(ort::kernel_context_get_output(context_, index, dims, rank, &value));
    if (value == nullptr) refuse("output %zu is missing; give it a name in the graph", index);
    void* data = nullptr;
    check(ort::get_tensor_mutable_data(value, &data));
    return data;
  }

  void share(void (*work)(void*, size_t), size_t count, void* user) const override {
    check(ort::kernel_context_parallel_for(context_, work, count, count, user));
  }

 private:
  ort::KernelContext* context_;
};

template <class Function>
ort::Status* as_status(Function&& function) {
  try {
    function();
    return nullptr;
  } catch (const OrtFailure& failure) {
    return failure.status;
  } catch (const InvalidArgument& error) {
    return ort::create_status(ort::api, ort::ErrorCode::kInvalidArgument, error.what());
  } catch (const std::bad_alloc&) {
    return ort::create_status(ort::api, ort::ErrorCode::kFail,
                              "the kernel ran out of memory for its scratch buffers; use fewer "
                              "tokens a step or a machine with more memory");
  } catch (const std::exception& error) {
    return ort::create_status(ort::api, ort::ErrorCode::kFail, error.what());
  }
}

template <class Kernel>
struct CustomOpFor : ort::CustomOp {
  CustomOpFor() : ort::CustomOp{} {
    using Op = const ort::CustomOp*;
    version = ort::kCustomOpVersion;
    get_name = [](Op) { return Kernel::kName; };
    get_execution_provider_type = [](Op) -> const char* { return "CPUExecutionProvider"; };
    get_input_type_count = [](Op) { return std::size(Kernel::kInputTypes); };
    get_input_type = [](Op, size_t index) { return Kernel::kInputTypes[index]; };
    get_output_type_count = [](Op) { return std::size(Kernel::kOutputTypes); };
    get_output_type = [](Op, size_t index) { return Kernel::kOutputTypes[index]; };
    get_input_characteristic = get_output_characteristic = [](Op, size_t) { return kRequired; };
    get_input_memory_type = [](Op, size_t) { return kDefaultMemory; };
    get_variadic_input_min_arity = get_variadic_input_homogeneity = [](Op) { return 0; };
    get_variadic_output_min_arity = get_variadic_output_homogeneity = [](Op) { return 0; };
    get_start_version = [](Op) { return 1; };
    get_end_version = [](Op) { return INT32_MAX; };
    create_kernel_v2 = [](Op, const ort::Api*, const ort::KernelInfo* info, void** kernel) {
      return as_status([&] { *kernel = new Kernel(OrtAttributes(info)); });
    };
    kernel_compute_v2 = [](void* kernel, ort::KernelContext* raw) {
      return as_status([&] {
        OrtContext context(raw);
        static_cast<const Kernel*>(kernel)->compute(context);
      });
    };
    kernel_destroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
    if constexpr (requires { Kernel::kInPlaceInputs; }) {
      static_assert(std::size(Kernel::kInPlaceInputs) == std::size(Kernel::kInPlaceOutputs));
      get_may_inplace = [](int** inputs, int** outputs) {
        // The C interface has no const here; ONNX Runtime only reads.
        *inputs = const_cast<int*>(Kernel::kInPlaceInputs);
        *outputs = const_cast<int*>(Kernel::kInPlaceOutputs);
        return std::size(Kernel::kInPlaceInputs);
      };
      release_may_inplace = [](int*, int*) {};
    }
  }

 private:
  static constexpr int kRequired = 0;       // OrtCustomOpInputOutputCharacteristic
  static constexpr int kDefaultMemory = 0;  // OrtMemTypeDefault
};

}  // namespace octavo
