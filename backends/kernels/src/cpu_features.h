// Which instruction set the kernels use on this CPU.
#pragma once

namespace octavo {

enum class InstructionSet { kPortable, kAvx2, kAvx512, kLanes16 };

// A set, and whether integer kernels also have its dot products of bytes (AVX-VNNI, AVX512-VNNI).
struct CpuFeatures {
  InstructionSet set;
  bool integer_dot_products;
};

const char* name_of(CpuFeatures features);

// The best that the CPU, the operating system and this build have, or what the environment variable
// OCTAVO_CPU_ISA names (portable, avx2, avx2_vnni, avx512, avx512_vnni). Throws InvalidArgument
// where the named one cannot run here. Read anew at each call: a session keeps what it was created
// with.
CpuFeatures selected_features();

// The same for kernels that have no use for integer dot products.
InstructionSet selected_instruction_set();

}  // namespace octavo
