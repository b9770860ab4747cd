// What a kernel asks of the framework that runs it: its tensors, its attributes and threads.
// `custom_op.h` answers for ONNX Runtime, `torch_op.h` for PyTorch.
//
// A kernel class declares
//   static constexpr const char* kName;
//   static constexpr ElementType kInputTypes[], kOutputTypes[];
//   static constexpr int kInPlaceInputs[], kInPlaceOutputs[];   input i's buffer may be output i's;
//                                                               left out where there are none
//   explicit Kernel(const Attributes&);
//   void compute(const Context&) const;
// and throws InvalidArgument with one sentence where it cannot go on. `compute` is const because
// several runs may be in it at once.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo {

// Numbered as ONNX and ONNX Runtime number them.
enum class ElementType : int {
  kFloat = 1,
  kUint8 = 2,
  kInt8 = 3,
  kInt32 = 6,
  kInt64 = 7,
  kFloat16 = 10,
  kDouble = 11
};

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
  // False, and `value` unchanged, where the node has no such attribute.
  virtual bool find(const char* name, int64_t* value) const = 0;
  virtual bool find(const char* name, float* value) const = 0;

  template <class T>
  T get_or(const char* name, T otherwise) const {
    find(name, &otherwise);
    return otherwise;
  }

 protected:
  ~Attributes() = default;
};

class Context {
 public:
  virtual Tensor input(size_t index) const = 0;
  // Room for an output of this shape: contiguous, its values unspecified.
  virtual void* output(size_t index, const int64_t* dims, size_t rank) const = 0;
  // Calls work(user, i) for some or all i below `count`, side by side, and waits: each call takes
  // from a common store of tasks until it is empty.
  virtual void share(void (*work)(void* user, size_t i), size_t count, void* user) const = 0;

 protected:
  ~Context() = default;
};

}  // namespace octavo
