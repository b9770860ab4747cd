#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "cpu_features.h"
#include "philox.h"

namespace octavo {
namespace {

constexpr double kLog2E = 1.4426950408889634;
using Limits = std::numeric_limits<float>;

// Positive, so that it makes no NaN of an infinite distance.
float scale_of(double temperature) {
  return static_cast<float>(std::max<double>(kLog2E / temperature, Limits::min()));
}

// The smallest logit whose weight is at least min_p. Weights are compared by their exponents, which
// unlike rounded powers of two never fall as logits rise.
float min_p_threshold(float largest, float scale, double min_p) {
  const auto exponent = static_cast<float>(std::log2(min_p));
  const auto kept = [&](float logit) { return (logit - largest) * scale >= exponent; };
  float below = Limits::lowest(), above = largest;
  if (kept(below)) return below;
  while (true) {
    const float middle = std::midpoint(below, above);
    if (middle <= below || middle >= above) return above;
    (kept(middle) ? above : below) = middle;
  }
}

}  // namespace

double weigh_kept(const SamplingKernel& kernel, const SamplingRow& row, int64_t vocab_size,
                  Candidates& candidates) {
  const float largest = candidates.start(kernel, row.logits, vocab_size);
  if (!std::isfinite(largest)) return 0.0;
  const float scale = scale_of(row.temperature);
  if (row.top_k > 0 && row.top_k < vocab_size)
    candidates.keep_at_least(candidates.find_top_k(row.top_k).threshold);
  if (row.min_p > 0.0) candidates.keep_at_least(min_p_threshold(largest, scale, row.min_p));
  const double total = candidates.weigh(scale);
  return row.top_p < 1.0 ? candidates.keep_top_p(scale, row.top_p * total) : total;
}

int32_t sample(const SamplingKernel& kernel, const SamplingRow& row, int64_t vocab_size,
               Candidates& candidates) {
  if (row.temperature == 0.0) {
    const float largest = candidates.start(kernel, row.logits, vocab_size);
    return std::isfinite(largest) ? candidates.first_of_largest() : -1;
  }
  const double total = weigh_kept(kernel, row, vocab_size, candidates);
  if (total == 0.0) return -1;
  return candidates.at_cumulative(uniform(row.seed, row.position, row.choice) * total);
}

TokenLogprob logprobs(const SamplingKernel& kernel, const LogprobsRow& row, int64_t vocab_size,
                      Candidates& candidates, int32_t* top_ids, double* top_logprobs) {
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  const int64_t count = row.num_logprobs;
  const double largest = candidates.start(kernel, row.logits, vocab_size);
  if (!std::isfinite(largest)) {
    std::fill_n(top_ids, count, -1);
    std::fill_n(top_logprobs, count, kNaN);
    return {kNaN, -1};
  }
  const double log_sum = std::log(candidates.weigh(static_cast<float>(kLog2E)));
  const auto logprob = [&](float logit) { return logit - largest - log_sum; };

  TokenLogprob token{-std::numeric_limits<double>::infinity(), vocab_size};
  if (row.token_id >= 0 && row.token_id < vocab_size) {
    const float logit = row.logits[row.token_id];
    token = {logprob(logit), 1 + kernel.count_larger(row.logits, vocab_size, logit)};
  }
  if (count == 0) return token;

  candidates.list(candidates.find_top_k(count));
  std::iota(top_ids, top_ids + count, 0);
  std::sort(top_ids, top_ids + count, [&](int32_t a, int32_t b) {
    return candidates.logit(a) > candidates.logit(b) ||
           (candidates.logit(a) == candidates.logit(b) && a < b);
  });
  for (int64_t i = 0; i < count; ++i) {
    const int32_t index = top_ids[i];
    top_ids[i] = candidates.id(index);
    top_logprobs[i] = logprob(candidates.logit(index));
  }
  return token;
}

const SamplingKernel& selected_sampling_kernel() {
  const InstructionSet set = selected_instruction_set();
#if defined(OCTAVO_KERNELS_LANES16)
  static_cast<void>(set);
  return sampling_lanes16();
#else
#if defined(__x86_64__)
  if (set == InstructionSet::kAvx512) return sampling_avx512();
  if (set == InstructionSet::kAvx2) return sampling_avx2();
#endif
  static_cast<void>(set);
  return sampling_portable();
#endif
}

}  // namespace octavo
