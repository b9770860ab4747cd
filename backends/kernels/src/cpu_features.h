// Which instruction set the kernels use on this CPU.
#pragma once

namespace octavo {

enum class InstructionSet { kPortable, kAvx2, kAvx512, kLanes16 };

const char* name_of(InstructionSet set);

// The best set that the CPU, the operating system and this build have, or the one that the
// environment variable OCTAVO_CPU_ISA names (portable, avx2, avx512). Throws InvalidArgument where
// the named one cannot run here. Read anew at each call: a session keeps what it was created with.
InstructionSet selected_instruction_set();

}  // namespace octavo
