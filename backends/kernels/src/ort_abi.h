// The part of ONNX Runtime's C ABI that a custom-op library needs, so that building needs no
// ONNX Runtime headers.
//
// Source: include/onnxruntime/core/session/onnxruntime_c_api.h. OrtApi is an append-only table of
// function pointers: a slot keeps its index for ever, and GetApi(v) returns null where the runtime
// is older than v. The slots below all exist in API version 24 (ONNX Runtime 1.24), which
// registration asks for, so a table that is too short is never read.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernel_host.h"

namespace octavo::ort {

struct Status;
struct Value;
struct KernelContext;
struct KernelInfo;
struct CustomOpDomain;
struct SessionOptions;
struct ShapeInferContext;

inline constexpr uint32_t kApiVersion = 24;
inline constexpr uint32_t kCustomOpVersion = 21;  // whose layout `CustomOp` below has

struct Api {
  void* slot[415];
};

struct ApiBase {
  const Api* (*get_api)(uint32_t version);
  const char* (*get_version_string)();
};

enum class ErrorCode : int { kFail = 1, kInvalidArgument = 2 };

// OrtCustomOp of API version 21: a version and 25 function pointers, in this order.
struct CustomOp {
  uint32_t version;
  void* (*create_kernel)(const CustomOp*, const Api*, const KernelInfo*);
  const char* (*get_name)(const CustomOp*);
  const char* (*get_execution_provider_type)(const CustomOp*);
  ElementType (*get_input_type)(const CustomOp*, size_t);
  size_t (*get_input_type_count)(const CustomOp*);
  ElementType (*get_output_type)(const CustomOp*, size_t);
  size_t (*get_output_type_count)(const CustomOp*);
  void (*kernel_compute)(void*, KernelContext*);
  void (*kernel_destroy)(void*);
  int (*get_input_characteristic)(const CustomOp*, size_t);
  int (*get_output_characteristic)(const CustomOp*, size_t);
  int (*get_input_memory_type)(const CustomOp*, size_t);
  int (*get_variadic_input_min_arity)(const CustomOp*);
  int (*get_variadic_input_homogeneity)(const CustomOp*);
  int (*get_variadic_output_min_arity)(const CustomOp*);
  int (*get_variadic_output_homogeneity)(const CustomOp*);
  Status* (*create_kernel_v2)(const CustomOp*, const Api*, const KernelInfo*, void**);
  Status* (*kernel_compute_v2)(void*, KernelContext*);
  Status* (*infer_output_shape)(const CustomOp*, ShapeInferContext*);
  int (*get_start_version)(const CustomOp*);
  int (*get_end_version)(const CustomOp*);
  size_t (*get_may_inplace)(int** inputs, int** outputs);
  void (*release_may_inplace)(int* inputs, int* outputs);
  size_t (*get_alias_map)(int** inputs, int** outputs);
  void (*release_alias_map)(int* inputs, int* outputs);
};
static_assert(sizeof(CustomOp) == 26 * sizeof(void*), "OrtCustomOp has 26 pointer-sized members");

// Set once by RegisterCustomOps before any other function here is called.
inline const Api* api = nullptr;

template <class Result, class... Arguments>
Result call(const Api* table, size_t slot, Arguments... arguments) {
  return reinterpret_cast<Result (*)(Arguments...)>(table->slot[slot])(arguments...);
}

inline Status* create_status(const Api* table, ErrorCode code, const char* message) {
  return call<Status*>(table, 0, code, message);
}
inline Status* create_custom_op_domain(const char* name, CustomOpDomain** domain) {
  return call<Status*>(api, 26, name, domain);
}
inline Status* custom_op_domain_add(CustomOpDomain* domain, const CustomOp* op) {
  return call<Status*>(api, 27, domain, op);
}
inline Status* add_custom_op_domain(SessionOptions* options, CustomOpDomain* domain) {
  return call<Status*>(api, 28, options, domain);
}
inline Status* get_tensor_mutable_data(Value* value, void** data) {
  return call<Status*>(api, 51, value, data);
}
inline Status* kernel_info_get_attribute(const KernelInfo* info, const char* name, float* out) {
  return call<Status*>(api, 85, info, name, out);
}
inline Status* kernel_info_get_attribute(const KernelInfo* info, const char* name, int64_t* out) {
  return call<Status*>(api, 86, info, name, out);
}
inline Status* kernel_context_get_input(const KernelContext* context, size_t index,
                                        const Value** value) {
  return call<Status*>(api, 90, context, index, value);
}
inline Status* kernel_context_get_output(KernelContext* context, size_t index, const int64_t* dims,
                                         size_t count, Value** value) {
  return call<Status*>(api, 91, context, index, dims, count, value);
}
inline void release_status(Status* status) { call<void>(api, 93, status); }
// Calls function(user, 0..total-1) on the session's intra-op pool and waits; with num_batch ==
// total the indices are handed out one by one.
inline Status* kernel_context_parallel_for(const KernelContext* context,
                                           void (*function)(void*, size_t), size_t total,
                                           size_t num_batch, void* user) {
  return call<Status*>(api, 274, context, function, total, num_batch, user);
}
// `dims` stays the runtime's, and valid as long as the value: nothing is allocated.
inline Status* get_tensor_type_and_shape(const Value* value, ElementType* type,
                                         const int64_t** dims, size_t* count) {
  return call<Status*>(api, 414, value, type, dims, count);
}

}  // namespace octavo::ort
