// Paged attention over one tile of rows, for the instruction set V (Avx512, Avx2, Portable<..>).
//
// Flash attention (Dao et al. 2022) with split keys (Dao et al. 2023) on a paged cache (Kwon et
// al. 2023). Included once by each paged_attention_<set>.cc; everything is in an unnamed namespace
// and nothing of the standard library is instantiated, because the file is compiled for an
// instruction set that the CPU at hand may lack.
//
// Exactness. A row's score with a key is one chain of fused multiply-adds over the head's
// elements; its output is one chain over exactly the keys it sees, in order. Both chains are the
// same whatever rows or columns share the registers. Running maxima move at sub-block ends, partial
// results end at segment ends, both at absolute key positions. So nothing depends on the schedule,
// and no slot that a row does not see can touch it, not even with NaN or infinity in it.
#pragma once

#include "paged_attention_kernel.h"
#include "paged_attention_math.inl.h"
#include "paged_attention_steps.inl.h"
#include "paged_attention_tile.inl.h"
#include "paged_attention_widen.inl.h"
#include "paged_attention_write.inl.h"

namespace octavo {
namespace {

// Keys [first, last) where they lie.
template <class V, class Element, bool Prefetch>
void attend_in_cache(const TileWork& work, int64_t first, int64_t last, PartialResult& state) {
  const AttentionProblem& p = *work.problem;
  SubBlocks<Element, Prefetch> at{{}, locate<Element>(work, first), p.block_size, p.cache_size};
  for (int64_t start = first; start < last; start += kSubBlock) {
    at.now = at.next;
    at.next = locate<Element>(work, start + kSubBlock);
    attend_sub_block<V>(work, at, state);
  }
}

// Keys [first, last) of an s8 cache, each sub-block made floats first.
template <class V>
void attend_widened(const TileWork& work, int64_t first, int64_t last, PartialResult& state) {
  SubBlocks<float, false> at{};
  at.key_stride = kKeyGroup;
  at.value_stride = padded_value_size(*work.problem);
  for (int64_t start = first; start < last; start += kSubBlock) {
    at.now = widen<V>(work, locate<int8_t>(work, start));
    attend_sub_block<V>(work, at, state);
  }
}

// The partial result of one segment, from nothing.
template <class V>
void attend_segment(const TileWork& work, int64_t segment, PartialResult state) {
  const int num_rows = work.tile.num_rows;
  const int64_t size = int64_t{num_rows} * padded_value_size(*work.problem);
  __builtin_memset(state.accumulator, 0, static_cast<size_t>(size) * sizeof(float));
  for (int row = 0; row < num_rows; ++row) {
    state.maximum[row] = kNoMaximum;
    state.sum[row] = 0.0f;
  }
  const int64_t first = larger(segment * kSegment, work.first_key[0] / kSubBlock * kSubBlock);
  const int64_t last = smaller((segment + 1) * kSegment, work.last_key[num_rows - 1]);
  const bool few_rows = waits_for_memory<V>(num_rows);
  if (work.problem->scales != nullptr)
    few_rows ? attend_in_cache<V, int8_t, true>(work, first, last, state)
             : attend_widened<V>(work, first, last, state);
  else
    few_rows ? attend_in_cache<V, float, true>(work, first, last, state)
             : attend_in_cache<V, float, false>(work, first, last, state);
}

template <class V>
void merge(const PartialResult& total, const PartialResult& next, int num_rows, int padded_size) {
  for (int row = 0; row < num_rows; ++row) {
    const float a = total.maximum[row], b = next.maximum[row], maximum = a > b ? a : b;
    const float keep = exp2_scalar<V>(a - maximum), join = exp2_scalar<V>(b - maximum);
    total.maximum[row] = maximum;
    total.sum[row] = total.sum[row] * keep + next.sum[row] * join;
    float* sums = total.accumulator + int64_t{row} * padded_size;
    const float* more = next.accumulator + int64_t{row} * padded_size;
    for (int i = 0; i < padded_size; i += V::kLanes) {
      const auto kept = V::mul(V::load(sums + i), V::set1(keep));
      V::store(sums + i, V::fma(V::load(more + i), V::set1(join), kept));
    }
  }
}

// What a row's sums are multiplied by in the end; 0 where it saw no key.
template <class V>
float normaliser(const AttentionProblem& p, int head, float maximum, float sum) {
  if (p.sinks == nullptr) return sum == 0.0f ? 0.0f : 1.0f / sum;
  const float sink = p.sinks[head] * kLog2E, top = sink > maximum ? sink : maximum;
  const float keep = exp2_scalar<V>(maximum - top);
  const float denominator = sum * keep + exp2_scalar<V>(sink - top);
  return denominator == 0.0f ? 0.0f : keep / denominator;
}

template <class V>
void write_output(const AttentionProblem& p, const RowTile& tile, const PartialResult& total) {
  const int padded_size = padded_value_size(p);
  const auto zero = V::set1(0.0f);
  for (int row = 0; row < tile.num_rows; ++row) {
    const HeadRow at = head_row(p, tile, row);
    const auto factor =
        V::set1(normaliser<V>(p, at.head, total.maximum[row], total.sum[row]));
    const float* sums = total.accumulator + int64_t{row} * padded_size;
    float* output = p.output + (at.token * p.num_heads + at.head) * p.value_size;
    int i = 0;
    // Adding zero makes -0 and +0 one: merging into a row of zeros may have changed the sign.
    for (; i + V::kLanes <= p.value_size; i += V::kLanes)
      V::store(output + i, V::add(V::mul(V::load(sums + i), factor), zero));
    if (i < p.value_size)
      V::store_first(output + i, V::add(V::mul(V::load(sums + i), factor), zero),
                     p.value_size - i);
  }
}

template <class V>
int64_t scratch_size(const AttentionProblem& p, int32_t num_rows) {
  TileWork work{};
  Carver carver{nullptr, 0};
  carve<V>(p, num_rows, carver, work);
  return carver.used;
}

template <class V>
void attend_tile(const AttentionProblem& p, const RowTile& tile, float* scratch) {
  const TileWork work = start_tile<V>(p, tile, scratch);
  const int64_t first = work.first_key[0] / kSegment;
  const int64_t last = (work.last_key[tile.num_rows - 1] - 1) / kSegment;
  attend_segment<V>(work, first, work.total);
  for (int64_t segment = first + 1; segment <= last; ++segment) {
    attend_segment<V>(work, segment, work.segment);
    merge<V>(work.total, work.segment, tile.num_rows, padded_value_size(p));
  }
  write_output<V>(p, tile, work.total);
}

template <class V>
void attend_segments(const AttentionProblem& p, const RowTile& tile, int64_t first, int64_t last,
                     float* partials, float* scratch) {
  const TileWork work = start_tile<V>(p, tile, scratch);
  const int64_t size = partial_result_floats(p, tile.num_rows);
  for (int64_t segment = first; segment < last; ++segment, partials += size)
    attend_segment<V>(work, segment, partial_result_at(p, tile.num_rows, partials));
}

template <class V>
void merge_segments(const AttentionProblem& p, const RowTile& tile, float* partials,
                    int64_t count) {
  const int64_t size = partial_result_floats(p, tile.num_rows);
  const PartialResult total = partial_result_at(p, tile.num_rows, partials);
  for (int64_t i = 1; i < count; ++i)
    merge<V>(total, partial_result_at(p, tile.num_rows, partials + i * size), tile.num_rows,
             padded_value_size(p));
  write_output<V>(p, tile, total);
}

template <class V>
constexpr AttentionKernel kKernel = {V::kRows,        write_token<V>,     scratch_size<V>,
                                     attend_tile<V>,  attend_segments<V>, merge_segments<V>};

}  // namespace
}  // namespace octavo
