// Adapts a C++ kernel class to ONNX Runtime's C custom-op interface.
//
// A kernel class declares
//   static constexpr const char* kName;
//   static constexpr ort::ElementType kInputTypes[], kOutputTypes[];
//   static constexpr int kInPlaceInputs[], kInPlaceOutputs[];   input i's buffer may be output i's;
//                                                               left out where there are none
//   explicit Kernel(const Attributes&);
//   void compute(Context&) const;
// and throws InvalidArgument with one sentence where it cannot go on. `compute` is const because
// several runs of one session may be in it at once.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <iterator>
#include <new>

#include "errors.h"
#include "ort_abi.h"

namespace octavo {

inline constexpr size_t kMaxRank = 8;

struct Tensor {
  void* data;
  size_t rank;
  int64_t dims[kMaxRank];

  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

class Attributes {
 public:
  explicit Attributes(const ort::KernelInfo* info) : info_(info) {}

  template <class T>
  T get_or(const char* name, T otherwise) const {
    T value{};
    ort::Status* status = ort::kernel_info_get_attribute(info_, name, &value);
    if (status == nullptr) return value;
    ort::release_status(status);
    return otherwise;
  }

 private:
  const ort::KernelInfo* info_;
};

class Context {
 public:
  explicit Context(ort::KernelContext* context) : context_(context) {}

  Tensor input(size_t index) const {
    const ort::Value* value = nullptr;
    check(ort::kernel_context_get_input(context_, index, &value));
    if (value == nullptr) refuse("input %zu is missing; connect a tensor to it", index);
    Tensor tensor{};
    ort::ElementType type{};
    const int64_t* dims = nullptr;
    check(ort::get_tensor_type_and_shape(value, &type, &dims, &tensor.rank));
    if (tensor.rank > kMaxRank)
      refuse("input %zu has %zu dimensions, more than %zu", index, tensor.rank, kMaxRank);
    std::copy_n(dims, tensor.rank, tensor.dims);
    // The C interface has no const accessor; inputs are not written through this pointer.
    check(ort::get_tensor_mutable_data(const_cast<ort::Value*>(value), &tensor.data));
    return tensor;
  }

  void* output(size_t index, const int64_t* dims, size_t rank) const {
    ort::Value* value = nullptr;
    check(ort::kernel_context_get_output(context_, index, dims, rank, &value));
    if (value == nullptr) refuse("output %zu is missing; give it a name in the graph", index);
    void* data = nullptr;
    check(ort::get_tensor_mutable_data(value, &data));
    return data;
  }

  const ort::KernelContext* raw() const { return context_; }

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
      return as_status([&] { *kernel = new Kernel(Attributes(info)); });
    };
    kernel_compute_v2 = [](void* kernel, ort::KernelContext* raw) {
      return as_status([&] {
        Context context(raw);
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
