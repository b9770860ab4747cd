// `Lanes` floats in the compiler's own vector type: any CPU, no intrinsics. This file says what
// each function of an instruction set means; the others do the same with their instructions.
//
// All sets do the same operations in the same order, so their results are equal bit for bit
// wherever `fma` rounds once. Where the CPU has no fused multiply-add it rounds twice.
#pragma once

#include <stdint.h>

namespace octavo {
namespace {

// Spelt out because GCC 12 does not subscript a vector type whose size is a template's parameter.
template <int Lanes>
struct VectorOf;
template <>
struct VectorOf<4> {
  typedef float Floats __attribute__((vector_size(16)));
  typedef int Ints __attribute__((vector_size(16)));
  typedef double Doubles __attribute__((vector_size(32)));
};
template <>
struct VectorOf<16> {
  typedef float Floats __attribute__((vector_size(64)));
  typedef int Ints __attribute__((vector_size(64)));
  typedef double Doubles __attribute__((vector_size(128)));
};

template <int Lanes, int Rows, int Accumulators>
struct Portable {
  static constexpr int kLanes = Lanes;
  static constexpr int kRows = Rows;                  // rows of the largest register tile
  static constexpr int kAccumulators = Accumulators;  // registers that a tile accumulates in

  using Vec = typename VectorOf<Lanes>::Floats;
  using Mask = typename VectorOf<Lanes>::Ints;
  using Wide = typename VectorOf<Lanes>::Doubles;  // kLanes doubles; Wide{} is zero

  static Vec set1(float x) { return x - Vec{}; }
  static Vec load(const float* p) {
    Vec x;
    __builtin_memcpy(&x, p, sizeof(x));
    return x;
  }
  // The first n lanes from memory and zeros; reads nothing behind them.
  static Vec load_first(const float* p, int n) {
    Vec x{};
    for (int i = 0; i < Lanes && i < n; ++i) x[i] = p[i];
    return x;
  }
  static Vec load_int8(const int8_t* p) { return load_first_int8(p, Lanes); }
  static Vec load_first_int8(const int8_t* p, int n) {
    Vec x{};
    for (int i = 0; i < Lanes && i < n; ++i) x[i] = static_cast<float>(p[i]);
    return x;
  }
  static void store(float* p, Vec x) { __builtin_memcpy(p, &x, sizeof(x)); }
  static void store_first(float* p, Vec x, int n) {
    for (int i = 0; i < Lanes && i < n; ++i) p[i] = x[i];
  }

  static Vec add(Vec a, Vec b) { return a + b; }
  static Vec sub(Vec a, Vec b) { return a - b; }
  static Vec mul(Vec a, Vec b) { return a * b; }
  static Vec div(Vec a, Vec b) { return a / b; }
  // a * b + c
  static Vec fma(Vec a, Vec b, Vec c) {
#ifdef __FP_FAST_FMAF
    for (int i = 0; i < Lanes; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#else
    return a * b + c;
#endif
  }
  // b where either is NaN, as x86 has it.
  static Vec max(Vec a, Vec b) { return a > b ? a : b; }
  static Vec abs(Vec x) { return as_floats(as_ints(x) & 0x7fffffff); }
  static Vec copy_sign(Vec magnitude, Vec sign) {
    return as_floats(as_ints(magnitude) | (as_ints(sign) & ~0x7fffffff));
  }
  // The float whose exponent field is the low 8 bits of x's representation, and 0 elsewhere.
  static Vec bits_to_exponent(Vec x) { return as_floats(as_ints(x) << 23); }
  static Vec iota() {
    Vec x{};
    for (int i = 0; i < Lanes; ++i) x[i] = static_cast<float>(i);
    return x;
  }

  // Lanes 2 i and 2 i + 1 change places.
  static Vec swap_neighbours(Vec x) {
    Vec y{};
    for (int i = 0; i < Lanes; ++i) y[i] = x[i ^ 1];
    return y;
  }

  static Mask less(Vec a, Vec b) { return a < b; }
  static Vec select(Mask m, Vec yes, Vec no) { return m ? yes : no; }

  // Adds the upper half of the lanes to the lower half until one is left.
  static float reduce_add(Vec x) {
    for (int half = Lanes / 2; half > 0; half /= 2)
      for (int i = 0; i < half; ++i) x[i] += x[i + half];
    return x[0];
  }
  static float reduce_max(Vec x) {
    for (int half = Lanes / 2; half > 0; half /= 2)
      for (int i = 0; i < half; ++i) x[i] = x[i] > x[i + half] ? x[i] : x[i + half];
    return x[0];
  }
  static float first(Vec x) { return x[0]; }
  // Bit i is lane i's. Two lanes at a time, a low one in the low half.
  static unsigned bits(Mask m) {
    uint64_t pairs[Lanes / 2], all = 0;
    __builtin_memcpy(pairs, &m, sizeof(m));
    for (int i = 0; i < Lanes / 2; ++i) all |= ((pairs[i] & 1) | (pairs[i] >> 62 & 2)) << (2 * i);
    return static_cast<unsigned>(all);
  }
  // Stores the lanes whose bits are set, side by side; what else of kLanes floats it writes means
  // nothing.
  static void store_chosen(float* p, Vec x, unsigned chosen) {
    for (int i = 0; i < Lanes; ++i) {
      *p = x[i];
      p += chosen >> i & 1;
    }
  }

  static Wide add_wide(Wide sum, Vec x) { return sum + __builtin_convertvector(x, Wide); }
  // In no promised order: for sums that are exact.
  static double reduce_wide(Wide sum) {
    double total = 0.0;
    for (int i = 0; i < Lanes; ++i) total += sum[i];
    return total;
  }

 private:
  static Mask as_ints(Vec x) {
    Mask bits;
    __builtin_memcpy(&bits, &x, sizeof(x));
    return bits;
  }
  static Vec as_floats(Mask bits) {
    Vec x;
    __builtin_memcpy(&x, &bits, sizeof(x));
    return x;
  }
};

}  // namespace
}  // namespace octavo
