// What Python calls, see backends/kernels/sampling.py. No exception crosses: a status other than 0
// says that memory ran out.
#include <new>

#include "errors.h"
#include "export.h"
#include "sampling.h"

namespace octavo {
namespace {

// Of the calling thread. Kept, so that a step allocates nothing.
Candidates& scratch() {
  static thread_local Candidates candidates;
  return candidates;
}

template <class Body>
int32_t as_status(const Body& body) {
  try {
    body();
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

}  // namespace
}  // namespace octavo

// The kernel of the instruction set that is selected now, or null where OCTAVO_CPU_ISA names one
// that this CPU or build does not have.
OCTAVO_EXPORT const octavo::SamplingKernel* octavo_sampling_kernel() {
  try {
    return &octavo::selected_sampling_kernel();
  } catch (const octavo::InvalidArgument&) {
    return nullptr;
  }
}

// The largest vocabulary that can be sampled from.
OCTAVO_EXPORT int64_t octavo_sampling_most_columns() { return octavo::kMostSamplingColumns; }

// tokens [count] of rows [count].
OCTAVO_EXPORT int32_t octavo_sample(const octavo::SamplingKernel* kernel,
                                    const octavo::SamplingRow* rows, int64_t count,
                                    int64_t vocab_size, int32_t* tokens) {
  return octavo::as_status([&] {
    for (int64_t i = 0; i < count; ++i)
      tokens[i] = octavo::sample(*kernel, rows[i], vocab_size, octavo::scratch());
  });
}

// tokens [count] of rows [count]; top_ids and top_logprobs hold the rows' num_logprobs one after
// the other.
OCTAVO_EXPORT int32_t octavo_logprobs(const octavo::SamplingKernel* kernel,
                                      const octavo::LogprobsRow* rows, int64_t count,
                                      int64_t vocab_size, octavo::TokenLogprob* tokens,
                                      int32_t* top_ids, double* top_logprobs) {
  return octavo::as_status([&] {
    for (int64_t i = 0; i < count; ++i) {
      tokens[i] = octavo::logprobs(*kernel, rows[i], vocab_size, octavo::scratch(), top_ids,
                                   top_logprobs);
      top_ids += rows[i].num_logprobs;
      top_logprobs += rows[i].num_logprobs;
    }
  });
}
