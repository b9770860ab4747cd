#include "sampling_cut.h"

#include <algorithm>
#include <bit>

namespace octavo {
namespace {

constexpr int64_t kFewToSort = 64;
constexpr int kBucketBits = 8;
constexpr uint32_t kSign = 0x80000000u;

// Unsigned integers in descending order of the floats, equal for equal floats.
uint32_t key_of(float value) {
  const auto bits = std::bit_cast<uint32_t>(value + 0.0f);  // -0 and 0 are equal
  return bits & kSign ? bits : bits ^ ~kSign;
}

float value_of(uint32_t key) { return std::bit_cast<float>(key & kSign ? key : key ^ ~kSign); }

}  // namespace

CutFinder::Range CutFinder::read(const float* values, const float* weights, int64_t count) {
  if (entries_.size() < static_cast<size_t>(count)) entries_.resize(static_cast<size_t>(count));
  Range range{count, ~0u, 0};
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t key = key_of(values[i]);
    entries_[static_cast<size_t>(i)] = {key, weights == nullptr ? 1.0f : weights[i]};
    range.lowest = std::min(range.lowest, key);
    range.highest = std::max(range.highest, key);
  }
  return range;
}

CutFinder::Range CutFinder::keep_bucket(Range range, int shift, uint32_t bucket) {
  Range kept{0, ~0u, 0};
  for (int64_t i = 0; i < range.count; ++i) {
    const Entry entry = entries_[static_cast<size_t>(i)];
    if ((entry.key - range.lowest) >> shift != bucket) continue;
    entries_[static_cast<size_t>(kept.count++)] = entry;
    kept.lowest = std::min(kept.lowest, entry.key);
    kept.highest = std::max(kept.highest, entry.key);
  }
  return kept;
}

// Each round finds the bucket that the set ends in and forgets the others; sums are exact, so the
// rounds add up to what a sorted walk would.
Cut CutFinder::find(const float* values, const float* weights, int64_t count, double goal,
                    double before) {
  Range range = read(values, weights, count);
  double mass = before;
  while (range.count > kFewToSort && range.lowest != range.highest) {
    const int width = static_cast<int>(std::bit_width(range.highest - range.lowest));
    const int shift = std::max(0, width - kBucketBits);
    double masses[1 << kBucketBits] = {};
    for (int64_t i = 0; i < range.count; ++i) {
      const Entry& entry = entries_[static_cast<size_t>(i)];
      masses[(entry.key - range.lowest) >> shift] += static_cast<double>(entry.weight);
    }
    const uint32_t last = (range.highest - range.lowest) >> shift;
    uint32_t bucket = 0;
    for (; bucket < last && mass + masses[bucket] < goal; ++bucket) mass += masses[bucket];
    range = keep_bucket(range, shift, bucket);
  }
  const auto begin = entries_.begin();
  if (range.lowest != range.highest)
    std::sort(begin, begin + range.count,
              [](const Entry& a, const Entry& b) { return a.key < b.key; });
  int64_t end = 0;
  while (end < range.count && (end == 0 || mass < goal))
    mass += static_cast<double>(begin[end++].weight);
  const uint32_t edge = begin[end - 1].key;
  int64_t surplus = 0;
  while (end + surplus < range.count && begin[end + surplus].key == edge) ++surplus;
  return {value_of(edge), surplus, mass};
}

}  // namespace octavo
