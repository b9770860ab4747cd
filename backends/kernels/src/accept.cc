#include "accept.h"

#include <algorithm>
#include <cinttypes>
#include <vector>

#include "errors.h"
#include "sampling.h"

namespace octavo {
namespace {

constexpr int32_t kNoToken = -1;

template <class T>
const T* rows_of(const Context& context, size_t index, const char* name, int64_t rows,
                 int64_t columns = 1) {
  const Tensor tensor = context.input(index);
  const size_t rank = columns == 1 ? 1 : 2;
  if (tensor.rank != rank || tensor.dims[0] != rows || (rank == 2 && tensor.dims[1] != columns))
    refuse("%s has another shape than [%" PRId64 ", %" PRId64 "]", name, rows, columns);
  return tensor.as<const T>();
}

// The inputs of one call, checked: indices out of range would read outside of them.
struct Problem {
  const float* logits;
  int64_t rows, columns, vocab;
  const int32_t *edit_rows, *edit_tokens;
  const float* edit_values;
  int64_t edits;
  const int32_t *first_rows, *drafts, *prob_rows, *top_k;
  const float* probs;
  const double *temperature, *top_p, *min_p, *uniforms;
};

void check_index(const char* name, int64_t value, int64_t least, int64_t end) {
  if (value < least || value >= end)
    refuse("%s has %" PRId64 ", which is not in [%" PRId64 ", %" PRId64 ")", name, value, least,
           end);
}

Problem read(const Context& context, int64_t vocab) {
  Problem p{};
  const Tensor logits = context.input(0);
  if (logits.rank != 2 || logits.dims[1] < vocab)
    refuse("logits have to be [L, V] with at least %" PRId64 " columns", vocab);
  p.logits = logits.as<const float>();
  p.rows = logits.dims[0];
  p.columns = logits.dims[1];
  p.vocab = vocab;
  const Tensor edit_rows = context.input(1), probs = context.input(6);
  p.edits = edit_rows.rank == 1 ? edit_rows.dims[0] : -1;
  p.edit_rows = rows_of<int32_t>(context, 1, "edit_rows", p.edits);
  p.edit_tokens = rows_of<int32_t>(context, 2, "edit_token_ids", p.edits);
  p.edit_values = rows_of<float>(context, 3, "edit_values", p.edits);
  p.first_rows = rows_of<int32_t>(context, 4, "first_rows", p.rows);
  p.drafts = rows_of<int32_t>(context, 5, "draft_token_ids", p.rows);
  const int64_t num_probs = probs.rank == 2 ? probs.dims[0] : -1;
  p.probs = rows_of<float>(context, 6, "draft_probs", num_probs, p.columns);
  p.prob_rows = rows_of<int32_t>(context, 7, "prob_rows", p.rows);
  p.temperature = rows_of<double>(context, 8, "temperature", p.rows);
  p.top_k = rows_of<int32_t>(context, 9, "top_k", p.rows);
  p.top_p = rows_of<double>(context, 10, "top_p", p.rows);
  p.min_p = rows_of<double>(context, 11, "min_p", p.rows);
  p.uniforms = rows_of<double>(context, 12, "uniforms", p.rows, 2);
  for (int64_t i = 0; i < p.edits; ++i) {
    check_index("edit_rows", p.edit_rows[i], 0, p.rows);
    check_index("edit_token_ids", p.edit_tokens[i], 0, p.columns);
  }
  for (int64_t row = 0; row < p.rows; ++row) {
    check_index("first_rows", p.first_rows[row], 0, row + 1);
    check_index("draft_token_ids", p.drafts[row], -1, p.vocab);
    check_index("prob_rows", p.prob_rows[row], -1, num_probs);
  }
  return p;
}

// A row's logits after its edits; only an edited row is copied.
class EditedRows {
 public:
  explicit EditedRows(const Problem& problem) : p_(problem) {
    order_.resize(static_cast<size_t>(p_.edits));
    for (size_t i = 0; i < order_.size(); ++i) order_[i] = static_cast<int64_t>(i);
    std::stable_sort(order_.begin(), order_.end(), [&](int64_t a, int64_t b) {
      return p_.edit_rows[a] < p_.edit_rows[b];
    });
  }

  const float* operator[](int64_t row) {
    const float* logits = p_.logits + row * p_.columns;
    const auto before = [&](int64_t edit, int64_t of) { return p_.edit_rows[edit] < of; };
    auto edit = std::lower_bound(order_.begin(), order_.end(), row, before);
    if (edit == order_.end() || p_.edit_rows[*edit] != row) return logits;
    copy_.assign(logits, logits + p_.columns);
    for (; edit != order_.end() && p_.edit_rows[*edit] == row; ++edit)
      copy_[static_cast<size_t>(p_.edit_tokens[*edit])] = p_.edit_values[*edit];
    return copy_.data();
  }

 private:
  const Problem& p_;
  std::vector<int64_t> order_;  // edits by row
  std::vector<float> copy_;
};

SamplingRow parameters(const Problem& p, int64_t row, const float* logits) {
  return {logits, 0, 0, p.temperature[row], p.top_p[row], p.min_p[row], p.top_k[row], 0};
}

// The row's draft if it is accepted, else the token in its place; kNoToken where logits are no
// numbers.
int32_t random_token(const SamplingKernel& kernel, const Problem& p, int64_t index,
                     const SamplingRow& row, Candidates& candidates) {
  const double total = weigh_kept(kernel, row, p.vocab, candidates);
  if (total == 0.0) return kNoToken;
  const double* uniforms = p.uniforms + 2 * index;
  const int32_t draft = p.drafts[index];
  if (draft < 0) return candidates.at_cumulative(uniforms[1] * total);
  const float* probs =
      p.prob_rows[index] < 0 ? nullptr : p.probs + p.prob_rows[index] * p.columns;
  const double q = probs == nullptr ? 1.0 : static_cast<double>(probs[draft]);
  // Not "u < p / q": what was never likely must not pass because u is 0.
  if (uniforms[0] * q < candidates.weight_of(draft) / total) return draft;
  double left = probs == nullptr ? candidates.take_away(draft, total)
                                 : candidates.take_away(probs, total);
  if (left <= 0.0) left = weigh_kept(kernel, row, p.vocab, candidates);
  return candidates.at_cumulative(uniforms[1] * left);
}

}  // namespace

Accept::Accept(const Attributes& attributes)
    : vocab_(attributes.get_or<int64_t>("vocab", 0)), kernel_(selected_sampling_kernel()) {
  if (vocab_ < 1 || vocab_ > kMostSamplingColumns)
    refuse("vocab is %" PRId64 " and has to be 1 to %" PRId64, vocab_, kMostSamplingColumns);
}

void Accept::compute(const Context& context) const {
  const Problem p = read(context, vocab_);
  const int64_t dims[] = {p.rows};
  auto* tokens = static_cast<int32_t*>(context.output(0, dims, 1));
  EditedRows logits(p);
  thread_local Candidates candidates;
  bool ended = false;
  for (int64_t row = 0; row < p.rows; ++row) {
    if (p.first_rows[row] == row) ended = false;
    tokens[row] = kNoToken;
    if (ended) continue;
    const SamplingRow own = parameters(p, row, logits[row]);
    tokens[row] = own.temperature == 0.0 ? sample(kernel_, own, vocab_, candidates)
                                         : random_token(kernel_, p, row, own, candidates);
    ended = p.drafts[row] < 0 || tokens[row] != p.drafts[row];
  }
}

}  // namespace octavo
