// Tile shapes shared between AVX-512 and the portable build that tests its shapes.
#pragma once

namespace octavo {

// 6 rows of 4 registers, 4 loads and a broadcast use 29 of 32 registers.
constexpr int kRowsOf32Registers = 6;
constexpr int kAccumulatorsOf32Registers = 24;

}  // namespace octavo
