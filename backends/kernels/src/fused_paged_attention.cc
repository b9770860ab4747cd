#include "fused_paged_attention.h"

#include <cinttypes>
#include <cmath>

#include "errors.h"
#include "paged_attention_run.h"

namespace octavo {
namespace {

enum Input : size_t { kQkv, kCos, kSin, kQueryNorm, kKeyNorm, kCache };

constexpr int64_t kMaxHeads = 65536;

int32_t read_count(const Attributes& attributes, const char* name, int64_t limit) {
  const int64_t count = attributes.get_or(name, int64_t{0});
  if (count < 1 || count > limit)
    refuse("%s is missing or %" PRId64 " and has to lie in 1 to %" PRId64
           "; set it to the model's",
           name, count, limit);
  return static_cast<int32_t>(count);
}

FusedPagedAttentionAttributes read_fused_attributes(const Attributes& attributes) {
  FusedPagedAttentionAttributes read{};
  read.attention = read_attention_attributes(attributes);
  read.num_heads = read_count(attributes, "num_heads", kMaxHeads);
  read.num_kv_heads = read_count(attributes, "num_kv_heads", kMaxHeads);
  read.head_size = read_count(attributes, "head_size", kMaxHeadSize);
  if (read.num_heads % read.num_kv_heads != 0)
    refuse("num_heads is %d and num_kv_heads %d; the first has to be a multiple of the second",
           read.num_heads, read.num_kv_heads);
  const int64_t interleaved = attributes.get_or("interleaved", int64_t{0});
  if (interleaved != 0 && interleaved != 1)
    refuse("interleaved is %" PRId64 " and has to be 0 or 1", interleaved);
  read.interleaved = interleaved == 1;
  read.norm_epsilon = attributes.get_or("norm_epsilon", 0.0f);
  if (!(read.norm_epsilon >= 0.0f && std::isfinite(read.norm_epsilon)))
    refuse("norm_epsilon is %g and may not be negative; set it to the model's",
           static_cast<double>(read.norm_epsilon));
  return read;
}

// [Dk] or, where the model has none, [0].
const float* read_norm(const Context& context, Input index, const char* name, int32_t head_size) {
  const NamedTensor weight = read_input(context, index, name, 1);
  if (weight.dims[0] == 0) return nullptr;
  expect(weight, 0, head_size, "the attribute head_size, or 0 for no norm");
  return weight.as<const float>();
}

RotaryEmbedding read_rotary(const Context& context, const AttentionProblem& p, bool interleaved) {
  const NamedTensor cos = read_input(context, kCos, "cos", 2);
  const NamedTensor sin = read_input(context, kSin, "sin", 2);
  for (size_t i = 0; i < 2; ++i) expect(sin, i, cos.dims[i], "as of cos");
  const int64_t size = cos.dims[1];
  if (size == 0) return {};
  expect(cos, 0, p.num_tokens, "one row a token, or [0, 0] for no rotary embedding");
  if (size % 2 != 0 || size > p.key_size)
    refuse("cos has %" PRId64 " columns and the head size is %d; the rotated elements have to be "
           "an even number of a head's",
           size, p.key_size);
  return {cos.as<const float>(), sin.as<const float>(), static_cast<int32_t>(size), interleaved};
}

// The width is H * Dk + Hkv * Dk + Hkv * Dv; the attributes leave only Dv open.
int32_t value_size(const FusedPagedAttentionAttributes& attributes, int64_t width) {
  const int64_t heads = int64_t{attributes.num_heads} + attributes.num_kv_heads;
  const int64_t values = width - heads * attributes.head_size;
  if (values < attributes.num_kv_heads || values % attributes.num_kv_heads != 0)
    refuse("qkv has %" PRId64 " columns and %d query heads and %d KV heads of %d leave %" PRId64
           " of them for values; they have to be a positive multiple of the KV heads",
           width, attributes.num_heads, attributes.num_kv_heads, attributes.head_size, values);
  return static_cast<int32_t>(values / attributes.num_kv_heads);
}

void read_packed(const Context& context, const FusedPagedAttentionAttributes& attributes,
                 AttentionProblem& p) {
  const NamedTensor qkv = read_input(context, kQkv, "qkv", 2);
  p.num_tokens = qkv.dims[0];
  p.num_heads = attributes.num_heads;
  p.num_kv_heads = attributes.num_kv_heads;
  p.key_size = attributes.head_size;
  p.value_size = value_size(attributes, qkv.dims[1]);
  p.query = qkv.as<const float>();
  p.key = p.query + int64_t{p.num_heads} * p.key_size;
  p.value = p.key + int64_t{p.num_kv_heads} * p.key_size;
  p.query_stride = p.key_stride = p.value_stride = qkv.dims[1];
  p.rotary = read_rotary(context, p, attributes.interleaved);
  p.query_norm = read_norm(context, kQueryNorm, "query_norm", p.key_size);
  p.key_norm = read_norm(context, kKeyNorm, "key_norm", p.key_size);
  p.norm_epsilon = attributes.norm_epsilon;
}

float* attention_output(const Context& context, const AttentionProblem& p) {
  const int64_t dims[] = {p.num_tokens, int64_t{p.num_heads} * p.value_size};
  return static_cast<float*>(context.output(0, dims, 2));
}

}  // namespace

FusedPagedAttention::FusedPagedAttention(const Attributes& attributes)
    : attributes_(read_fused_attributes(attributes)), kernel_(attention_kernel()) {}

void FusedPagedAttention::compute(const Context& context) const {
  AttentionProblem p{};
  read_packed(context, attributes_, p);
  const CacheInputs inputs = read_step(context, attributes_.attention, kCache, false, p);
  p.output = attention_output(context, p);
  p.cache = changed_output(context, 1, inputs.cache, sizeof(float));
  write_and_attend(context, p, kernel_);
}

FusedPagedAttentionInt8::FusedPagedAttentionInt8(const Attributes& attributes)
    : attributes_(read_fused_attributes(attributes)), kernel_(attention_kernel()) {}

void FusedPagedAttentionInt8::compute(const Context& context) const {
  AttentionProblem p{};
  read_packed(context, attributes_, p);
  const CacheInputs inputs = read_step(context, attributes_.attention, kCache, true, p);
  p.output = attention_output(context, p);
  p.cache = changed_output(context, 1, inputs.cache, sizeof(int8_t));
  p.scales = static_cast<float*>(changed_output(context, 2, inputs.scales, sizeof(float)));
  write_and_attend(context, p, kernel_);
}

}  // namespace octavo
