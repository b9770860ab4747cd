// The tokens of a row that sampling has not ruled out yet, in the order of their ids.
//
// Few candidates are a list. Many stay in the row with a threshold below which tokens are ruled
// out: a pass over a whole row costs less than a thousand steps of a list.
#pragma once

#include <cstdint>
#include <vector>

#include "sampling_cut.h"
#include "sampling_kernel.h"

namespace octavo {

// One object serves many rows, so that it allocates nothing in the steady state.
class Candidates {
 public:
  // Begins with all tokens of logits [count], 0 < count <= kMostSamplingColumns. Returns the
  // largest logit, NaN where one is NaN or +infinity; unless it is finite nothing else may be
  // called.
  float start(const SamplingKernel& kernel, const float* logits, int64_t count);

  // The first token of the whole row with its largest logit.
  int32_t first_of_largest() const;

  // Where the k most likely tokens of the whole row end, 0 < k <= count. May rule out others.
  Cut find_top_k(int64_t k);
  void keep_at_least(float threshold);

  // Gives every candidate its weight 2^((logit - largest) * scale) and returns their sum.
  double weigh(float scale);
  // Keeps the smallest set of most likely candidates whose weights sum to at least `goal`, which
  // is at most the sum of all; of ties at its edge the first. Returns the set's sum.
  double keep_top_p(float scale, double goal);
  // The first candidate at which the cumulative weight passes `goal`, which is less than the sum.
  int32_t at_cumulative(double goal) const;

  // The weight of a token, 0 if it is ruled out.
  double weight_of(int32_t token) const;
  // Takes what a token weighs, or `total` times probs [row] of each one, away from the weights, as
  // far as there is any; returns what all weigh then. The token is one of the row's.
  double take_away(int32_t token, double total);
  double take_away(const float* probs, double total);

  // Makes a list of the candidates in the cut of find_top_k, which are `count` then.
  void list(const Cut& cut);
  int32_t id(int64_t index) const { return listed_ ? ids_[index] : static_cast<int32_t>(index); }
  float logit(int64_t index) const { return logits()[index]; }

 private:
  const float* logits() const { return listed_ ? logits_.data() : row_; }
  const float* maxima() const { return listed_ ? nullptr : maxima_.data(); }
  int64_t index_of(int32_t token) const;
  int64_t find(float threshold, int64_t limit);
  void list_found(int64_t found);
  Cut find_cut(const float* weights, double goal, float step);

  const SamplingKernel* kernel_ = nullptr;
  const float* row_ = nullptr;
  int64_t count_ = 0;  // of the row, or of the list
  float largest_ = 0.0f;
  float threshold_ = 0.0f;  // smaller logits are ruled out
  bool listed_ = false;
  std::vector<float> maxima_;   // of the row, see SamplingKernel
  std::vector<int32_t> found_;  // indices of candidates
  std::vector<int32_t> ids_;    // [count]
  std::vector<float> logits_;   // [count]
  std::vector<float> weights_;  // [blocks * kSamplingBlock]
  std::vector<double> sums_;    // [blocks]
  std::vector<float> edge_logits_, edge_weights_;  // of where a cut may be, and room behind
  CutFinder cut_finder_;
};

}  // namespace octavo
