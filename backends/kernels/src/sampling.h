// Choosing one token of a row of logits, and the log probabilities of a row's tokens.
//
// Whatever a row's outcome depends on is in its arguments: never the other rows of a step, never
// the thread, never which instruction set with fused multiply-add computes it.
#pragma once

#include <cstdint>

#include "sampling_candidates.h"
#include "sampling_kernel.h"

namespace octavo {

// As backends/kernels/sampling.py packs it.
struct SamplingRow {
  const float* logits;  // [vocab_size]
  uint64_t seed;
  uint64_t position;
  double temperature;  // 0: greedy
  double top_p;        // 1: all
  double min_p;        // 0: all
  int32_t top_k;       // 0: all
  uint32_t choice;
};

// The token of a row, or -1 where its largest logit is not finite or a logit is NaN.
int32_t sample(const SamplingKernel& kernel, const SamplingRow& row, int64_t vocab_size,
               Candidates& candidates);

// What `sample` begins with: rules out all but what temperature, top-k, min-p and top-p leave, and
// weighs it. Returns the sum of weights, 0 where the largest logit is not finite or a logit is NaN.
double weigh_kept(const SamplingKernel& kernel, const SamplingRow& row, int64_t vocab_size,
                  Candidates& candidates);

struct LogprobsRow {
  const float* logits;  // [vocab_size]
  int32_t token_id;     // outside of the vocabulary: probability 0, last rank
  int32_t num_logprobs;
};

struct TokenLogprob {
  double logprob;
  int64_t rank;
};

// Log-softmax of a token with its rank, 1 + the number of larger logits, and of the `num_logprobs`
// most likely ones, of ties the first ids, in descending order. Where `sample` gives -1 every
// number is NaN and every id and rank -1. num_logprobs is at most vocab_size.
TokenLogprob logprobs(const SamplingKernel& kernel, const LogprobsRow& row, int64_t vocab_size,
                      Candidates& candidates, int32_t* top_ids, double* top_logprobs);

const SamplingKernel& selected_sampling_kernel();

}  // namespace octavo
