#include "sampling_candidates.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace octavo {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
// A cut is looked for among this many at a time.
constexpr int64_t kFewEnough = 1024;
// A pass over the row takes as long as this share of its tokens in a list.
constexpr int64_t kSparse = 16;
// More steps only help where logits are crowded beyond what models return.
constexpr int kMostSteps = 32;
// The search for the edge of top-p begins at weights of 2^-4.
constexpr float kFirstExponent = 4.0f;
// That for a large top-k begins at this distance from the largest logit, and no search at more than
// logits usually span.
constexpr float kFirstDistance = 1.0f, kLongestFirstDistance = 64.0f;

template <class T>
void grow(std::vector<T>& values, int64_t count) {
  if (values.size() < static_cast<size_t>(count)) values.resize(static_cast<size_t>(count));
}

}  // namespace

float Candidates::start(const SamplingKernel& kernel, const float* logits, int64_t count) {
  kernel_ = &kernel;
  row_ = logits;
  count_ = count;
  threshold_ = -kInfinity;
  listed_ = false;
  grow(maxima_, sampling_blocks(count) * kSamplingLanes);
  largest_ = kernel.largest(logits, count, maxima_.data());
  return largest_;
}

int32_t Candidates::first_of_largest() const {
  const auto lane = std::find(maxima_.begin(), maxima_.end(), largest_) - maxima_.begin();
  const int64_t block = lane / kSamplingLanes * kSamplingBlock;
  return static_cast<int32_t>(std::find(row_ + block, row_ + count_, largest_) - row_);
}

// Of the blocks' maxima k are at least the k-th largest maximum, so the k-th largest logit is no
// less than that.
Cut Candidates::find_top_k(int64_t k) {
  const int64_t blocks = sampling_blocks(count_);
  const auto goal = static_cast<double>(k);
  if (k <= blocks) {
    grow(edge_logits_, blocks);
    for (int64_t block = 0; block < blocks; ++block) {
      const float* lanes = maxima_.data() + block * kSamplingLanes;
      edge_logits_[block] = *std::max_element(lanes, lanes + kSamplingLanes);
    }
    keep_at_least(cut_finder_.find(edge_logits_.data(), nullptr, blocks, goal).threshold);
  }
  return find_cut(nullptr, goal, kFirstDistance);
}

void Candidates::keep_at_least(float threshold) {
  threshold_ = std::max(threshold_, threshold);
  const int64_t limit = count_ / kSparse;
  const int64_t found = find(threshold_, limit);
  if (found <= limit) list_found(found);
}

void Candidates::list(const Cut& cut) {
  const int64_t found = find(cut.threshold, count_);
  const auto is_tie = [&](int32_t index) { return logit(index) == cut.threshold; };
  int64_t ties = std::count_if(found_.begin(), found_.begin() + found, is_tie) - cut.surplus;
  const auto end = std::remove_if(found_.begin(), found_.begin() + found,
                                  [&](int32_t index) { return is_tie(index) && --ties < 0; });
  list_found(end - found_.begin());
}

int64_t Candidates::find(float threshold, int64_t limit) {
  grow(found_, limit + kSamplingBlock);
  return kernel_->at_least(logits(), count_, maxima(), threshold, limit, found_.data());
}

// Indices ascend, so candidates move down over those that are gone.
void Candidates::list_found(int64_t found) {
  grow(ids_, found);
  grow(logits_, found);
  const float* from = logits();
  for (int64_t i = 0; i < found; ++i) {
    const int32_t index = found_[i];
    ids_[i] = id(index);
    logits_[i] = from[index];
  }
  count_ = found;
  listed_ = true;
}

double Candidates::weigh(float scale) {
  const int64_t blocks = sampling_blocks(count_);
  grow(weights_, blocks * kSamplingBlock);
  grow(sums_, blocks);
  kernel_->weigh(logits(), count_, largest_, scale, threshold_, weights_.data(), sums_.data());
  return std::accumulate(sums_.begin(), sums_.begin() + blocks, 0.0);
}

double Candidates::keep_top_p(float scale, double goal) {
  const float distance = std::min(kFirstExponent / scale, kLongestFirstDistance);
  const Cut cut = find_cut(weights_.data(), goal, distance);
  kernel_->mask(logits(), count_, cut.threshold, weights_.data(), sums_.data());
  int64_t surplus = cut.surplus;
  for (int64_t index = count_ - 1; surplus > 0; --index) {
    if (logit(index) != cut.threshold) continue;
    sums_[index / kSamplingBlock] -= static_cast<double>(weights_[index]);
    weights_[index] = 0.0f;
    --surplus;
  }
  return cut.mass;
}

int32_t Candidates::at_cumulative(double goal) const {
  int64_t block = 0;
  double before = 0.0;
  for (; before + sums_[block] <= goal; ++block) before += sums_[block];
  int64_t index = block * kSamplingBlock;
  while ((before += static_cast<double>(weights_[index])) <= goal) ++index;
  return id(index);
}

// In a list ids ascend. Of a token that is not listed, the number of candidates.
int64_t Candidates::index_of(int32_t token) const {
  if (!listed_) return token;
  const auto end = ids_.begin() + count_;
  const auto found = std::lower_bound(ids_.begin(), end, token);
  return found != end && *found == token ? found - ids_.begin() : count_;
}

double Candidates::weight_of(int32_t token) const {
  const int64_t index = index_of(token);
  return index < count_ ? static_cast<double>(weights_[index]) : 0.0;
}

double Candidates::take_away(int32_t token, double total) {
  const int64_t index = index_of(token);
  if (index == count_) return total;
  const auto weight = static_cast<double>(weights_[index]);
  sums_[index / kSamplingBlock] -= weight;
  weights_[index] = 0.0f;
  return total - weight;
}

// What is left is rounded to multiples of 2^-34 again, so that sums stay exact.
double Candidates::take_away(const float* probs, double total) {
  constexpr double kUnit = 0x1p-34;
  double left = 0.0;
  for (int64_t block = 0; block < sampling_blocks(count_); ++block) {
    const int64_t end = std::min((block + 1) * kSamplingBlock, count_);
    double sum = 0.0;
    for (int64_t i = block * kSamplingBlock; i < end; ++i) {
      const double rest = weights_[i] - total * static_cast<double>(probs[id(i)]);
      const auto rounded = static_cast<float>(rest > 0.0 ? std::nearbyint(rest / kUnit) * kUnit : 0.0);
      weights_[i] = static_cast<float>(std::nearbyint(rounded / kUnit) * kUnit);
      sum += static_cast<double>(weights_[i]);
    }
    sums_[block] = sum;
    left += sum;
  }
  return left;
}

// The cut lies in [low, high): logits of at least `high` do not reach the goal, those of at least
// `low` do. Steps that double find a `low`, then halving brings the two together. Once most are
// outside of them, those within go on alone.
Cut Candidates::find_cut(const float* weights, double goal, float step) {
  const float* values = logits();
  const float* lanes = maxima();
  int64_t count = count_;
  float low = -kInfinity, high = kInfinity;
  SamplingMass reached{count_, 0.0}, above{0, 0.0}, left_out{0, 0.0};
  const auto go_on_within = [&] {
    const int64_t within = reached.count - above.count;
    grow(edge_logits_, within + kSamplingBlock);
    if (weights != nullptr) grow(edge_weights_, within + kSamplingBlock);
    count = kernel_->gather(values, weights, count, lanes, low, high, edge_logits_.data(),
                            edge_weights_.data());
    values = edge_logits_.data();
    if (weights != nullptr) weights = edge_weights_.data();
    lanes = nullptr;
    left_out = above;
  };
  for (int steps = 0; steps < kMostSteps && count > kFewEnough; ++steps) {
    const bool bounded = low > -kInfinity;
    const float at = bounded ? std::midpoint(low, std::min(high, largest_)) : largest_ - step;
    if (at <= low || at >= high) break;  // between neighbours, or at -infinity
    step *= 2.0f;
    SamplingMass found = kernel_->measure(values, weights, count, lanes, at);
    found.count += left_out.count;
    found.mass += left_out.mass;
    const bool reaches = (weights == nullptr ? found.count : found.mass) >= goal;
    (reaches ? low : high) = at;
    (reaches ? reached : above) = found;
    if (reached.count - above.count <= count / 2) go_on_within();
  }
  const double before = weights == nullptr ? static_cast<double>(left_out.count) : left_out.mass;
  return cut_finder_.find(values, weights, count, goal, before);
}

}  // namespace octavo
