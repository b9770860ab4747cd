// Where the set of the largest values ends that reaches a goal, without sorting them all.
#pragma once

#include <cstdint>
#include <vector>

namespace octavo {

// The set: every value above the threshold and all but the last `surplus` of those equal to it.
struct Cut {
  float threshold;
  int64_t surplus;
  double mass;  // the set's sum of weights, with what came before
};

class CutFinder {
 public:
  // The smallest set of largest values [count] whose weights [count], or whose number where weights
  // is null, together with what came before them sum to at least the goal. It holds one value at
  // least. count > 0, no value is NaN, sums are exact.
  Cut find(const float* values, const float* weights, int64_t count, double goal,
           double before = 0.0);

 private:
  struct Entry {
    uint32_t key;
    float weight;
  };
  struct Range {
    int64_t count;
    uint32_t lowest;
    uint32_t highest;
  };
  Range read(const float* values, const float* weights, int64_t count);
  Range keep_bucket(Range range, int shift, uint32_t bucket);

  std::vector<Entry> entries_;
};

}  // namespace octavo
