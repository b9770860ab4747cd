// The interface between the steps of sampling (sampling*.cc, built for the baseline CPU) and the
// passes over a row (sampling_<set>.cc, each built for its own instruction set). Plain data only,
// see paged_attention_kernel.h.
//
// Weights are multiples of 2^-34 of at most 1. So every sum of them is exact in a double, whatever
// the order of additions, as long as a row has no more columns than this.
#pragma once

#include <stdint.h>

namespace octavo {

constexpr int64_t kMostSamplingColumns = 1 << 19;
constexpr int64_t kSamplingBlock = 256;  // columns of a row that share a sum
constexpr int64_t kSamplingLanes = 16;   // of a block have a maximum each: columns 16 apart

// Blocks that `count` columns fill, the last one perhaps in part.
constexpr int64_t sampling_blocks(int64_t count) {
  return (count + kSamplingBlock - 1) / kSamplingBlock;
}

struct SamplingMass {
  int64_t count;
  double mass;  // the sum of weights
};

// `count` is the number of a row's columns, `maxima` [blocks, kSamplingLanes] what `largest` wrote,
// or null for passes over every block.
struct SamplingKernel {
  // The largest of logits [count]; NaN if one is NaN or +infinity. Writes each lane's largest,
  // -infinity where it has no column.
  float (*largest)(const float* logits, int64_t count, float* maxima);

  // weights [blocks * kSamplingBlock] = 2^((logit - largest) * scale), rounded to multiples of
  // 2^-34; 0 for logits below the threshold, those of -infinity and behind the end. sums [blocks].
  void (*weigh)(const float* logits, int64_t count, float largest, float scale, float threshold,
                float* weights, double* sums);

  // Makes the weights of logits below the threshold 0 and writes sums anew.
  void (*mask)(const float* logits, int64_t count, float threshold, float* weights, double* sums);

  // Of the logits that are at least the threshold. Without weights (null) the mass is 0.
  SamplingMass (*measure)(const float* logits, const float* weights, int64_t count,
                          const float* maxima, float threshold);

  // The ascending indices of logits that are at least the threshold; returns how many. Stops soon
  // after there are more than `limit`; indices [limit + kSamplingBlock].
  int64_t (*at_least)(const float* logits, int64_t count, const float* maxima, float threshold,
                      int64_t limit, int32_t* indices);

  // Copies the logits that are at least `low` and less than `high`, and their weights unless these
  // are null, to arrays with room for kSamplingLanes more or onto themselves; returns how many.
  int64_t (*gather)(const float* logits, const float* weights, int64_t count, const float* maxima,
                    float low, float high, float* to_logits, float* to_weights);

  // How many logits are larger than x.
  int64_t (*count_larger)(const float* logits, int64_t count, float x);
};

const SamplingKernel& sampling_portable();
const SamplingKernel& sampling_avx2();
const SamplingKernel& sampling_avx512();
const SamplingKernel& sampling_lanes16();

}  // namespace octavo
