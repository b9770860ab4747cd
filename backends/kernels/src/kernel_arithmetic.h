// Shared by the arithmetic of all kernels.
#pragma once

#include <stdint.h>

// An array that a loop indexes is kept in registers only once the loop is unrolled.
#if defined(__clang__)
#define OCTAVO_UNROLL _Pragma("unroll")
#else
#define OCTAVO_UNROLL _Pragma("GCC unroll 16")
#endif

namespace octavo {
namespace {

// Not std::min and std::max: see paged_attention_kernel.inl.h.
inline int smaller(int a, int b) { return a < b ? a : b; }
inline int larger(int a, int b) { return a > b ? a : b; }
inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

}  // namespace
}  // namespace octavo
