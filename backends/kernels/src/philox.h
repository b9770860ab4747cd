// Random numbers as a pure function of what they are for: no state, so nothing depends on batching.
//
// Philox4x32-10 of J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
#pragma once

#include <array>
#include <cstdint>

namespace octavo {

// Four random words for a counter and a key, least significant words first.
inline std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter,
                                          std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53} * counter[0];
    const uint64_t product1 = uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key[0],
               static_cast<uint32_t>(product1),
               static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key[1],
               static_cast<uint32_t>(product0)};
    key = {key[0] + 0x9E3779B9, key[1] + 0xBB67AE85};
  }
  return counter;
}

// The number in [0, 1), with 53 random bits, of a token's position in one of a request's choices.
inline double uniform(uint64_t seed, uint64_t position, uint32_t choice) {
  const auto low = [](uint64_t x) { return static_cast<uint32_t>(x); };
  const auto words = philox4x32({low(position), low(position >> 32), choice, 0},
                                {low(seed), low(seed >> 32)});
  return static_cast<double>((uint64_t{words[1]} << 32 | words[0]) >> 11) * 0x1p-53;
}

}  // namespace octavo
