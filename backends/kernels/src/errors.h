// Errors inside the library are exceptions that carry one sentence; custom_op.h turns them into
// an OrtStatus at the boundary, which no exception may cross.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <stdexcept>
#include <string>

#include "ort_abi.h"

namespace octavo {

class InvalidArgument : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A status that ONNX Runtime itself returned; ownership goes back to it unchanged.
struct OrtFailure {
  ort::Status* status;
};

[[noreturn]] __attribute__((format(printf, 1, 2))) inline void refuse(const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  throw InvalidArgument(text);
}

inline void check(ort::Status* status) {
  if (status != nullptr) throw OrtFailure{status};
}

}  // namespace octavo
