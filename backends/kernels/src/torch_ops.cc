// What PyTorch sees of the library. To add an operator, list its kernel class in `kOps`.
#include <dlfcn.h>

#include <cstring>
#include <mutex>
#include <sstream>
#include <string>

#include "accept.h"
#include "export.h"
#include "fused_paged_attention.h"
#include "linear.h"
#include "paged_attention.h"
#include "quantized_linear.h"
#include "rowwise.h"
#include "torch_abi.h"
#include "torch_op.h"

namespace octavo {
namespace torch {

const char* open(const char* path) {
  void* const library = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) return "PyTorch is not loaded in this process; import torch first";
  static std::string missing;
  const auto find = [&](const char* name, auto& function) {
    void* const found = dlsym(library, name);
    if (found == nullptr && missing.empty())
      missing = std::string("this PyTorch has no ") + name + "; install torch 2.10 or later";
    function = reinterpret_cast<std::decay_t<decltype(function)>>(found);
  };
  missing.clear();
  find("aoti_torch_get_data_ptr", abi.get_data_ptr);
  find("aoti_torch_get_dim", abi.get_dim);
  find("aoti_torch_get_sizes", abi.get_sizes);
  find("aoti_torch_get_strides", abi.get_strides);
  find("aoti_torch_get_dtype", abi.get_dtype);
  find("aoti_torch_empty_strided", abi.empty_strided);
  find("aoti_torch_delete_tensor_object", abi.delete_tensor);
  find("aoti_torch_library_init_impl", abi.library_init_impl);
  find("aoti_torch_library_impl", abi.library_impl);
  find("torch_parallel_for", abi.parallel_for);
  find("torch_get_num_threads", abi.get_num_threads);
  find("aoti_torch_device_type_cpu", abi.device_type_cpu);
  find("aoti_torch_dtype_float32", abi.dtype_float32);
  find("aoti_torch_dtype_float64", abi.dtype_float64);
  find("aoti_torch_dtype_float16", abi.dtype_float16);
  find("aoti_torch_dtype_int8", abi.dtype_int8);
  find("aoti_torch_dtype_uint8", abi.dtype_uint8);
  find("aoti_torch_dtype_int32", abi.dtype_int32);
  find("aoti_torch_dtype_int64", abi.dtype_int64);
  return missing.empty() ? nullptr : missing.c_str();
}

}  // namespace torch

namespace {

struct TorchOp {
  const char* name;  // as ONNX Runtime has it
  std::vector<TorchAttribute>* attributes;
  torch::BoxedFunction run;
};

template <class Kernel>
constexpr TorchOp op() {
  return {Kernel::kName, &TorchOpFor<Kernel>::attributes, TorchOpFor<Kernel>::run};
}

const TorchOp kOps[] = {
    op<Accept>(),         op<FusedPagedAttention>(), op<FusedPagedAttentionInt8>(),
    op<Linear>(),         op<PagedAttention>(),      op<QuantizedLinear>(),
    op<Quantize>(),       op<Norm>(),                op<NormQuantize>(),
    op<Activate>(),       op<ActivateQuantize>(),
};

// "scale:float,causal:int"
std::vector<TorchAttribute> parsed(const char* attributes) {
  std::vector<TorchAttribute> all;
  std::istringstream text(attributes);
  for (std::string one; std::getline(text, one, ',');) {
    const size_t colon = one.find(':');
    all.push_back({one.substr(0, colon), one.substr(colon + 1) == "float"});
  }
  return all;
}

}  // namespace
}  // namespace octavo

// Finds the loaded library of PyTorch at `path`. Null, or one sentence.
OCTAVO_EXPORT const char* octavo_torch_open(const char* path) { return octavo::torch::open(path); }

// Gives the declared operator `qualified_name` ("library::name") the kernel called `kernel` as its
// implementation for CPUs; `attributes` are "name:type" after its tensors. Null, or one sentence.
OCTAVO_EXPORT const char* octavo_torch_implement(const char* kernel, const char* qualified_name,
                                                 const char* attributes) {
  using namespace octavo;
  const std::string qualified(qualified_name);
  const std::string library = qualified.substr(0, qualified.find("::"));
  for (const TorchOp& one : kOps) {
    if (std::strcmp(one.name, kernel) != 0) continue;
    *one.attributes = parsed(attributes);
    torch::LibraryHandle handle = nullptr;  // kept: an operator lives as long as its library
    if (torch::abi.library_init_impl(library.c_str(), "CPU", __FILE__, __LINE__, &handle) != 0 ||
        torch::abi.library_impl(handle, qualified_name, one.run) != 0)
      return "PyTorch refused the operator; its reason is on the error stream";
    return nullptr;
  }
  return "the library has no such kernel; build it again with `make setup`";
}

// What the last operator that failed in this thread said, once; empty if none has since.
OCTAVO_EXPORT const char* octavo_torch_take_error() {
  thread_local std::string taken;
  taken = std::move(octavo::torch_error);
  octavo::torch_error.clear();
  return taken.c_str();
}
