// The part of PyTorch's stable C ABI that an operator library needs, so that building needs no
// PyTorch headers and one file serves every version that has these functions (2.10 and later).
//
// Source: torch/csrc/inductor/aoti_torch/c/shim.h and torch/csrc/stable/c/shim.h.
#pragma once

#include <cstdint>

namespace octavo::torch {

struct TensorObject;
using TensorHandle = TensorObject*;
struct LibraryObject;
using LibraryHandle = LibraryObject*;
// 64 bits that hold a tensor's handle, an int64_t or a double.
using StableValue = uint64_t;
using BoxedFunction = void (*)(StableValue* stack, uint64_t num_inputs, uint64_t num_outputs);
// All but the dtypes return 0 for success.
using Status = int32_t;

struct Abi {
  Status (*get_data_ptr)(TensorHandle, void**);
  Status (*get_dim)(TensorHandle, int64_t*);
  Status (*get_sizes)(TensorHandle, int64_t**);    // borrowed
  Status (*get_strides)(TensorHandle, int64_t**);  // borrowed
  Status (*get_dtype)(TensorHandle, int32_t*);
  Status (*empty_strided)(int64_t rank, const int64_t* sizes, const int64_t* strides,
                          int32_t dtype, int32_t device_type, int32_t device_index, TensorHandle*);
  Status (*delete_tensor)(TensorHandle);
  Status (*library_init_impl)(const char* library, const char* key, const char* file,
                              uint32_t line, LibraryHandle*);
  Status (*library_impl)(LibraryHandle, const char* name, BoxedFunction);
  Status (*parallel_for)(int64_t begin, int64_t end, int64_t grain,
                         void (*function)(int64_t begin, int64_t end, void* user), void* user);
  Status (*get_num_threads)(uint32_t*);
  int32_t (*device_type_cpu)();
  int32_t (*dtype_float32)();
  int32_t (*dtype_float64)();
  int32_t (*dtype_float16)();
  int32_t (*dtype_int8)();
  int32_t (*dtype_uint8)();
  int32_t (*dtype_int32)();
  int32_t (*dtype_int64)();
};

// Set once, by `open`, before any other function of PyTorch is called.
inline Abi abi{};

// Finds the functions in the loaded library of PyTorch at `path`; null, or a sentence on what is
// missing.
const char* open(const char* path);

}  // namespace octavo::torch
