#include "paged_attention.h"

#include "paged_attention_run.h"

namespace octavo {
namespace {

enum Input : size_t { kQuery, kKey, kValue, kCache };

void read_heads(const Context& context, AttentionProblem& p) {
  const NamedTensor query = read_input(context, kQuery, "query", 3);
  const NamedTensor key = read_input(context, kKey, "key", 3);
  const NamedTensor value = read_input(context, kValue, "value", 3);
  p.query = query.as<const float>();
  p.key = key.as<const float>();
  p.value = value.as<const float>();
  p.num_tokens = query.dims[0];
  p.num_heads = static_cast<int32_t>(query.dims[1]);
  p.num_kv_heads = static_cast<int32_t>(key.dims[1]);
  p.key_size = static_cast<int32_t>(query.dims[2]);
  p.value_size = static_cast<int32_t>(value.dims[2]);
  p.query_stride = query.dims[1] * query.dims[2];
  p.key_stride = key.dims[1] * key.dims[2];
  p.value_stride = value.dims[1] * value.dims[2];
  expect(key, 0, p.num_tokens, "the number of query tokens");
  expect(key, 2, p.key_size, "the query's head size");
  expect(value, 0, p.num_tokens, "the number of query tokens");
  expect(value, 1, p.num_kv_heads, "the number of KV heads of key");
}

}  // namespace

PagedAttention::PagedAttention(const Attributes& attributes)
    : attributes_(read_attention_attributes(attributes)), kernel_(attention_kernel()) {}

void PagedAttention::compute(const Context& context) const {
  AttentionProblem p{};
  read_heads(context, p);
  const CacheInputs inputs = read_step(context, attributes_, kCache, false, p);
  const int64_t output_dims[] = {p.num_tokens, p.num_heads, p.value_size};
  p.output = static_cast<float*>(context.output(0, output_dims, 3));
  p.cache = changed_output(context, 1, inputs.cache, sizeof(float));
  write_and_attend(context, p, kernel_);
}

}  // namespace octavo
