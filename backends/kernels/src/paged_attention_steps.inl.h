// What happens to a sub-block of keys: scores, softmax, weighted values. Internal to
// paged_attention_kernel.inl.h.
#pragma once

#include "paged_attention_kernel.h"
#include "paged_attention_math.inl.h"
#include "paged_attention_softmax.inl.h"
#include "paged_attention_tile.inl.h"

namespace octavo {
namespace {

template <class Element>
constexpr int kCacheLine = 64 / static_cast<int>(sizeof(Element));
constexpr int kColumnsPerPass = 64;  // of a sub-block's values: 16 KiB

template <class V>
inline typename V::Vec load_elements(const float* p) {
  return V::load(p);
}
template <class V>
inline typename V::Vec load_elements(const int8_t* p) {
  return V::load_int8(p);
}

// Key groups that R rows are scored with at once.
template <class V, int R>
constexpr int groups_at_once() {
  const int registers = registers_per_row<V>(R, kSubBlock / V::kLanes);
  const int groups = registers * V::kLanes / kKeyGroup;
  return groups < 1 ? 1 : groups;
}

// scores[r][key] = sum over d of query[d][r] * keys[d][key] for the key groups [first, last),
// where first is a multiple of groups_at_once, and perhaps for some behind them.
template <class V, int R, class Element, bool Prefetch>
void score_keys(const AttentionProblem& p, const float* query,
                const SubBlocks<Element, Prefetch>& at, int first, int last, float* scores) {
  using Vec = typename V::Vec;
  constexpr int kGroups = groups_at_once<V, R>();
  constexpr int kPerGroup = kKeyGroup / V::kLanes;
  constexpr int kRegisters = kGroups * kPerGroup;
  // Rows of narrow elements share a line, which is then prefetched once.
  const int rows_per_line =
      at.key_stride < kCacheLine<Element> ? kCacheLine<Element> / static_cast<int>(at.key_stride)
                                          : 1;
  for (int group = first; group < last; group += kGroups) {
    const Element* keys[kGroups];
    const Element* next[kGroups];
    for (int g = 0; g < kGroups; ++g) {
      keys[g] = at.now.keys[group + g];
      next[g] = at.next.keys[group + g];
    }
    Vec sums[R][kRegisters];
    OCTAVO_UNROLL
    for (int r = 0; r < R; ++r)
      OCTAVO_UNROLL
      for (int j = 0; j < kRegisters; ++j) sums[r][j] = V::set1(0.0f);
    const float* q = query;
    for (int d = 0; d < p.key_size; ++d, q += R) {
      Vec k[kRegisters];
      OCTAVO_UNROLL
      for (int j = 0; j < kRegisters; ++j)
        k[j] = load_elements<V>(keys[j / kPerGroup] + j % kPerGroup * V::kLanes);
      for (int g = 0; g < kGroups; ++g) keys[g] += at.key_stride;
      if constexpr (Prefetch)
        if (d % rows_per_line == 0)
          for (int g = 0; g < kGroups; ++g) prefetch(next[g] + d * at.key_stride);
      OCTAVO_UNROLL
      for (int r = 0; r < R; ++r) {
        const Vec element = V::set1(q[r]);
        OCTAVO_UNROLL
        for (int j = 0; j < kRegisters; ++j) sums[r][j] = V::fma(element, k[j], sums[r][j]);
      }
    }
    OCTAVO_UNROLL
    for (int r = 0; r < R; ++r)
      OCTAVO_UNROLL
      for (int j = 0; j < kRegisters; ++j)
        V::store(scores + r * kSubBlock + group * kKeyGroup + j * V::kLanes, sums[r][j]);
  }
}

struct Weights {
  const float* rows;  // [R, kSubBlock]
  int first;          // keys [first, last) of the sub-block
  int last;
};

template <class V, bool Partial>
inline typename V::Vec load_columns(const float* p, int columns) {
  return Partial ? V::load_first(p, columns) : V::load(p);
}
template <class V, bool Partial>
inline typename V::Vec load_columns(const int8_t* p, int columns) {
  return Partial ? V::load_first_int8(p, columns) : V::load_int8(p);
}

// accumulator[r][column..] += weights[r][key] * values[key][column..], key after key.
template <class V, int R, int C, bool Partial, class Element, bool Prefetch>
void weigh_columns(const AttentionProblem& p, const Weights& w,
                   const SubBlocks<Element, Prefetch>& at, int column, float* accumulator,
                   int padded_size) {
  using Vec = typename V::Vec;
  const int64_t row_size = at.value_stride;
  const int columns = p.value_size - column;
  Vec sums[R][C];
  OCTAVO_UNROLL
  for (int r = 0; r < R; ++r)
    OCTAVO_UNROLL
    for (int j = 0; j < C; ++j)
      sums[r][j] = V::load(accumulator + r * padded_size + column + j * V::kLanes);
  for (int key = w.first; key < w.last;) {
    const int stop = smaller(w.last, (key / kKeyGroup + 1) * kKeyGroup);
    const int64_t offset = key % kKeyGroup * row_size + column;
    const Element* value = at.now.values[key / kKeyGroup] + offset;
    const Element* next = at.next.values[key / kKeyGroup] + offset;
    for (; key < stop; ++key, value += row_size, next += row_size) {
      if constexpr (Prefetch)
        OCTAVO_UNROLL
        for (int j = 0; j < C; j += kCacheLine<Element> / V::kLanes)
          prefetch(next + j * V::kLanes);
      Vec v[C];
      OCTAVO_UNROLL
      for (int j = 0; j < C; ++j)
        v[j] = load_columns<V, Partial>(value + j * V::kLanes, columns);
      OCTAVO_UNROLL
      for (int r = 0; r < R; ++r) {
        const Vec weight = V::set1(w.rows[r * kSubBlock + key]);
        OCTAVO_UNROLL
        for (int j = 0; j < C; ++j) sums[r][j] = V::fma(weight, v[j], sums[r][j]);
      }
    }
  }
  OCTAVO_UNROLL
  for (int r = 0; r < R; ++r)
    OCTAVO_UNROLL
    for (int j = 0; j < C; ++j)
      V::store(accumulator + r * padded_size + column + j * V::kLanes, sums[r][j]);
}

// The columns [column, end), C registers at a time, then fewer.
template <class V, int R, int C, class At>
void weigh_range(const AttentionProblem& p, const Weights& w, const At& at, int column, int end,
                 float* accumulator, int padded_size) {
  for (; column + C * V::kLanes <= end; column += C * V::kLanes)
    weigh_columns<V, R, C, false>(p, w, at, column, accumulator, padded_size);
  if constexpr (C > 1)
    weigh_range<V, R, C / 2>(p, w, at, column, end, accumulator, padded_size);
  else if (column < end)
    weigh_columns<V, R, 1, true>(p, w, at, column, accumulator, padded_size);
}

template <class V, int R, class At>
void weigh_values(const AttentionProblem& p, const Weights& w, const At& at, int column,
                  float* accumulator, int padded_size) {
  if (w.first >= w.last) return;
  constexpr int kRegisters = registers_per_row<V>(R, kColumnsPerPass / V::kLanes);
  const int end = smaller(column + kColumnsPerPass, p.value_size);
  weigh_range<V, R, kRegisters>(p, w, at, column, end, accumulator, padded_size);
}

// The keys [first, last) of a sub-block that each row of a register tile sees. Both rise.
template <int R>
struct VisibleRows {
  int first[R];
  int last[R];

  bool none() const { return last[R - 1] == 0 || first[0] == kSubBlock; }
};

inline int within_sub_block(int64_t position, int64_t start) {
  const int64_t offset = position - start;
  return static_cast<int>(offset < 0 ? 0 : offset > kSubBlock ? kSubBlock : offset);
}

template <int R>
VisibleRows<R> visible_rows(const TileWork& work, int row, int64_t start) {
  VisibleRows<R> seen;
  for (int r = 0; r < R; ++r) {
    seen.first[r] = within_sub_block(work.first_key[row + r], start);
    seen.last[r] = within_sub_block(work.last_key[row + r], start);
  }
  return seen;
}

// The three steps that a sub-block takes, each for R rows from `row` on.

template <class V>
struct ScoreStep {
  int first_group;  // key groups [first_group, last_group)
  int last_group;

  template <int R, class At>
  void run(const TileWork& work, int row, const At& at) const {
    const VisibleRows<R> seen = visible_rows<R>(work, row, at.now.start);
    if (seen.none()) return;
    const AttentionProblem& p = *work.problem;
    // Groups that go at once belong to the pass that their first belongs to.
    constexpr int kGroups = groups_at_once<V, R>();
    const int first = larger((first_group + kGroups - 1) / kGroups * kGroups,
                             seen.first[0] / kKeyGroup / kGroups * kGroups);
    const int last = smaller(last_group, (seen.last[R - 1] + kKeyGroup - 1) / kKeyGroup);
    const float* query = work.query + int64_t{row} * p.key_size;
    float* scores = work.scores + row * kSubBlock;
    score_keys<V, R>(p, query, at, first, last, scores);
  }
};

template <class V>
struct SoftmaxStep {
  PartialResult& state;

  template <int R, class At>
  void run(const TileWork& work, int row, const At& at) const {
    const AttentionProblem& p = *work.problem;
    const VisibleRows<R> seen = visible_rows<R>(work, row, at.now.start);
    if (seen.none()) return;
    const bool adjusted = p.softcap > 0.0f || p.alibi_slopes != nullptr;
    float* const scores = work.scores + row * kSubBlock;
    // Step by step for all rows, because each step is one long chain of dependent instructions.
    float maxima[R], sums[R];
    for (int r = 0; r < R; ++r) {
      float* row_scores = scores + r * kSubBlock;
      if (p.scales != nullptr) scale_keys<V>(row_scores, at.now.key_scales);
      if (adjusted) adjust_row<V>(work, row + r, at.now.start, row_scores);
      if (seen.first[r] > 0 || seen.last[r] < kSubBlock)
        mask_row<V>(row_scores, seen.first[r], seen.last[r]);
      const float top = row_maximum<V>(row_scores), before = state.maximum[row + r];
      maxima[r] = top > before ? top : before;
    }
    for (int r = 0; r < R; ++r) sums[r] = exponentiate_row<V>(scores + r * kSubBlock, maxima[r]);
    if (p.scales != nullptr)
      for (int r = 0; r < R; ++r) scale_keys<V>(scores + r * kSubBlock, at.now.value_scales);
    // A row that sees no key of the sub-block has the maximum it had and adds zeros.
    for (int r = 0; r < R; ++r)
      update_row<V>(state, row + r, padded_value_size(p), maxima[r], sums[r]);
  }
};

// The keys that all rows see are weighed for all at once; those before and after, row by row, so
// that no row multiplies a value that it does not see, even by zero.
template <class V>
struct WeighStep {
  PartialResult& state;
  int column;

  template <int R, class At>
  void run(const TileWork& work, int row, const At& at) const {
    const VisibleRows<R> seen = visible_rows<R>(work, row, at.now.start);
    const AttentionProblem& p = *work.problem;
    const int padded_size = padded_value_size(p);
    const float* weights = work.scores + row * kSubBlock;
    float* sums = state.accumulator + int64_t{row} * padded_size;
    const int shared_first = seen.first[R - 1];
    const int shared_last = larger(seen.last[0], shared_first);
    if (seen.first[0] < shared_first)
      for (int r = 0; r < R; ++r)
        weigh_values<V, 1>(p, {weights + r * kSubBlock, seen.first[r],
                               smaller(seen.last[r], shared_first)},
                           at, column, sums + r * padded_size, padded_size);
    weigh_values<V, R>(p, {weights, shared_first, shared_last}, at, column, sums, padded_size);
    if (shared_last < seen.last[R - 1])
      for (int r = 0; r < R; ++r)
        weigh_values<V, 1>(p, {weights + r * kSubBlock, shared_last, seen.last[r]}, at, column,
                           sums + r * padded_size, padded_size);
  }
};

template <int R, class Step, class At>
inline void run_rows(const Step& step, int rows, const TileWork& work, int row, const At& at) {
  if (rows == R)
    step.template run<R>(work, row, at);
  else if constexpr (R > 1)
    run_rows<R - 1>(step, rows, work, row, at);
}

template <class V, class Step, class At>
inline void run_tile(const Step& step, const TileWork& work, const At& at) {
  const int num_rows = work.tile.num_rows;
  for (int row = 0; row < num_rows; row += V::kRows)
    run_rows<V::kRows>(step, smaller(V::kRows, num_rows - row), work, row, at);
}

// All rows pass over a part of the keys or values that stays in the first-level cache meanwhile.
template <class V, class At>
void attend_sub_block(const TileWork& work, const At& at, PartialResult& state) {
  const AttentionProblem& p = *work.problem;
  const int groups = p.key_size <= 64 ? 4 : p.key_size <= 128 ? 2 : 1;
  for (int group = 0; group < kGroupsPerSubBlock; group += groups)
    run_tile<V>(ScoreStep<V>{group, group + groups}, work, at);
  run_tile<V>(SoftmaxStep<V>{state}, work, at);
  for (int column = 0; column < p.value_size; column += kColumnsPerPass)
    run_tile<V>(WeighStep<V>{state, column}, work, at);
}

}  // namespace
}  // namespace octavo
