// The portable code's shape for the registers that every CPU of an architecture has.
#pragma once

#include "simd_portable.h"

namespace octavo {
namespace {

#if defined(__aarch64__)
using Baseline = Portable<4, 6, 24>;  // 32 registers of 4 floats
#else
using Baseline = Portable<4, 3, 12>;  // 16 registers of 4 floats
#endif

}  // namespace
}  // namespace octavo
