"""The ONNX function bodies of `octavo::FusedPagedAttention` and of its int8 form.

Both unpack queries, keys and values, norm and turn them, and leave attention to PagedAttention.
"""

from __future__ import annotations

import onnx
import onnx.parser

from octavo.graphs.ops.fused_paged_attention import INT8_SCHEMA, SCHEMA
from octavo.graphs.ops.schema import DOMAIN, OperatorSchema

# A missing operand is an empty one: weights are filled up with ones, angles have no columns.
_UNPACK = """
  zero = Constant <value_ints = [0]> ()
  one = Constant <value_ints = [1]> ()
  two = Constant <value_ints = [2]> ()
  minus_one = Constant <value_ints = [-1]> ()
  largest_int64 = Constant <value_ints = [9223372036854775807]> ()
  zero_float = Constant <value_float = 0.0> ()
  one_float = Constant <value_float = 1.0> ()

  heads_value = Constant <value_int: int = @num_heads> ()
  heads = Unsqueeze (heads_value, zero)
  kv_heads_value = Constant <value_int: int = @num_kv_heads> ()
  kv_heads = Unsqueeze (kv_heads_value, zero)
  head_size_value = Constant <value_int: int = @head_size> ()
  head_size_row = Unsqueeze (head_size_value, zero)
  tokens = Shape <start = 0, end = 1> (qkv)
  columns = Shape <start = 1, end = 2> (qkv)
  query_columns = Mul (heads, head_size_row)
  key_columns = Mul (kv_heads, head_size_row)
  key_end = Add (query_columns, key_columns)
  value_columns = Sub (columns, key_end)
  value_size = Div (value_columns, kv_heads)

  query_rows = Slice (qkv, zero, query_columns, one)
  query_shape = Concat <axis = 0> (tokens, heads, head_size_row)
  query_heads = Reshape <allowzero = 1> (query_rows, query_shape)
  key_rows = Slice (qkv, query_columns, key_end, one)
  key_shape = Concat <axis = 0> (tokens, kv_heads, head_size_row)
  key_heads = Reshape <allowzero = 1> (key_rows, key_shape)
  value_rows = Slice (qkv, key_end, columns, one)
  value_shape = Concat <axis = 0> (tokens, kv_heads, value_size)
  value = Reshape <allowzero = 1> (value_rows, value_shape)

  epsilon = Constant <value_float: float = @norm_epsilon> ()
  unit_weights = Expand (one_float, head_size_row)
  query_weights = Concat <axis = 0> (query_norm, unit_weights)
  query_weight = Slice (query_weights, zero, head_size_row)
  query_square = Mul (query_heads, query_heads)
  query_mean = ReduceMean <keepdims = 1> (query_square, minus_one)
  query_shifted = Add (query_mean, epsilon)
  query_root = Sqrt (query_shifted)
  query_scaled = Div (query_heads, query_root)
  query_weighted = Mul (query_scaled, query_weight)
  query_norm_size = Size (query_norm)
  query_has_norm = Cast <to = 9> (query_norm_size)
  query_normed = Where (query_has_norm, query_weighted, query_heads)
  key_weights = Concat <axis = 0> (key_norm, unit_weights)
  key_weight = Slice (key_weights, zero, head_size_row)
  key_square = Mul (key_heads, key_heads)
  key_mean = ReduceMean <keepdims = 1> (key_square, minus_one)
  key_shifted = Add (key_mean, epsilon)
  key_root = Sqrt (key_shifted)
  key_scaled = Div (key_heads, key_root)
  key_weighted = Mul (key_scaled, key_weight)
  key_norm_size = Size (key_norm)
  key_has_norm = Cast <to = 9> (key_norm_size)
  key_normed = Where (key_has_norm, key_weighted, key_heads)

  turned_size = Shape <start = 1, end = 2> (cos)
  angle_shape = Concat <axis = 0> (tokens, one, turned_size)
  head_cos = Reshape <allowzero = 1> (cos, angle_shape)
  head_sin = Reshape <allowzero = 1> (sin, angle_shape)
  interleaved_value = Constant <value_int: int = @interleaved> ()
  is_interleaved = Cast <to = 9> (interleaved_value)
  zero_scalar = Constant <value_int = 0> ()
  one_scalar = Constant <value_int = 1> ()
  turned_size_scalar = Squeeze (turned_size, zero)
  element = Range (zero_scalar, turned_size_scalar, one_scalar)
  half = Div (turned_size, two)
  in_second_half = GreaterOrEqual (element, half)
  odd = Mod (element, two)
  is_odd = Cast <to = 9> (odd)
  second_neighbour = And (is_interleaved, is_odd)
  is_halved = Not (is_interleaved)
  second_of_halves = And (is_halved, in_second_half)
  is_second = Or (second_neighbour, second_of_halves)
  distance = Where (is_interleaved, one, half)
  earlier = Sub (element, distance)
  later = Add (element, distance)
  partner = Where (is_second, earlier, later)
  minus_one_float = Constant <value_float = -1.0> ()
  sign = Where (is_second, one_float, minus_one_float)
  signed_sin = Mul (head_sin, sign)
  query_turned = Slice (query_normed, zero, turned_size, two)
  query_partner = Gather <axis = 2> (query_turned, partner)
  query_by_cos = Mul (query_turned, head_cos)
  query_by_sin = Mul (query_partner, signed_sin)
  query_rotated = Add (query_by_cos, query_by_sin)
  query_passed = Slice (query_normed, turned_size, largest_int64, two)
  query = Concat <axis = 2> (query_rotated, query_passed)
  key_turned = Slice (key_normed, zero, turned_size, two)
  key_partner = Gather <axis = 2> (key_turned, partner)
  key_by_cos = Mul (key_turned, head_cos)
  key_by_sin = Mul (key_partner, signed_sin)
  key_rotated = Add (key_by_cos, key_by_sin)
  key_passed = Slice (key_normed, turned_size, largest_int64, two)
  key = Concat <axis = 2> (key_rotated, key_passed)
"""

_ATTENTION = """
  attention_by_head, {cache_out} = octavo.PagedAttention <
    scale: float = @scale, causal: int = @causal, sliding_window: int = @sliding_window,
    softcap: float = @softcap, k_transposed: int = @k_transposed
  > (query, key, value, {cache}, {slots}, block_tables, query_start_loc, prefix_offsets, sinks,
     alibi_slopes)
  attention_columns = Mul (heads, value_size)
  attention_shape = Concat <axis = 0> (tokens, attention_columns)
  attention = Reshape <allowzero = 1> (attention_by_head, attention_shape)
"""

# Cache and scales are addressed by flat indices, i64 as those of a large cache pass 2^31.
_QUANTIZE = """
  block_size = Shape <start = 3, end = 4> (kv_cache)
  row = Shape <start = 4, end = 5> (kv_cache)
  transposed_value = Constant <value_int: int = @k_transposed> ()
  transposed = Cast <to = 9> (transposed_value)
  all_slots = Cast <to = 7> (slot_mapping)
  written = GreaterOrEqual (all_slots, zero)
  slots = Compress <axis = 0> (all_slots, written)
  slot_column = Unsqueeze (slots, one)
  block = Div (slot_column, block_size)
  offset = Mod (slot_column, block_size)
  heads_per_block = Mul (two, kv_heads)
  first_head = Mul (block, heads_per_block)
  head_range = Range (zero_scalar, kv_heads_value, one_scalar)
  key_head = Add (first_head, head_range)
  value_head = Add (key_head, kv_heads)
  key_scale_base = Mul (key_head, block_size)
  key_scale_index = Add (key_scale_base, offset)
  value_scale_base = Mul (value_head, block_size)
  value_scale_index = Add (value_scale_base, offset)

  head_stride = Mul (block_size, row)
  key_offset_stride = Where (transposed, one, row)
  key_element_stride = Where (transposed, block_size, one)
  key_range = Range (zero_scalar, head_size_value, one_scalar)
  key_steps = Mul (key_range, key_element_stride)
  key_head_base = Mul (key_head, head_stride)
  key_offset = Mul (offset, key_offset_stride)
  key_base = Add (key_head_base, key_offset)
  key_base_column = Unsqueeze (key_base, two)
  key_index = Add (key_base_column, key_steps)
  value_size_scalar = Squeeze (value_size, zero)
  value_range = Range (zero_scalar, value_size_scalar, one_scalar)
  value_head_base = Mul (value_head, head_stride)
  value_offset = Mul (offset, row)
  value_base = Add (value_head_base, value_offset)
  value_base_column = Unsqueeze (value_base, two)
  value_index = Add (value_base_column, value_range)

  limit = Constant <value_float = 127.0> ()
  minus_limit = Constant <value_float = -127.0> ()
  largest_float = Constant <value_float = 3.4028234663852886e38> ()
  new_keys = Compress <axis = 0> (key, written)
  key_magnitude = Abs (new_keys)
  key_largest = ReduceMax <keepdims = 1> (key_magnitude, minus_one)
  key_scale = Div (key_largest, limit)
  key_is_zero = Equal (key_largest, zero_float)
  key_divisor = Where (key_is_zero, one_float, key_largest)
  key_quotient = Div (limit, key_divisor)
  key_factor = Min (key_quotient, largest_float)
  key_multiplied = Mul (new_keys, key_factor)
  key_rounded = Round (key_multiplied)
  key_clipped = Clip (key_rounded, minus_limit, limit)
  key_quantized = Cast <to = 3> (key_clipped)
  new_values = Compress <axis = 0> (value, written)
  value_magnitude = Abs (new_values)
  value_largest = ReduceMax <keepdims = 1> (value_magnitude, minus_one)
  value_scale = Div (value_largest, limit)
  value_is_zero = Equal (value_largest, zero_float)
  value_divisor = Where (value_is_zero, one_float, value_largest)
  value_quotient = Div (limit, value_divisor)
  value_factor = Min (value_quotient, largest_float)
  value_multiplied = Mul (new_values, value_factor)
  value_rounded = Round (value_multiplied)
  value_clipped = Clip (value_rounded, minus_limit, limit)
  value_quantized = Cast <to = 3> (value_clipped)

  cache_shape = Shape (kv_cache)
  flat_cache = Reshape (kv_cache, minus_one)
  flat_key_index = Reshape (key_index, minus_one)
  flat_keys = Reshape (key_quantized, minus_one)
  cache_with_keys = ScatterElements <axis = 0> (flat_cache, flat_key_index, flat_keys)
  flat_value_index = Reshape (value_index, minus_one)
  flat_values = Reshape (value_quantized, minus_one)
  new_flat_cache = ScatterElements <axis = 0> (cache_with_keys, flat_value_index, flat_values)
  kv_cache_out = Reshape (new_flat_cache, cache_shape)
  scales_shape = Shape (kv_scales)
  flat_scales = Reshape (kv_scales, minus_one)
  flat_key_scale_index = Reshape (key_scale_index, minus_one)
  flat_key_scales = Reshape (key_scale, minus_one)
  scales_with_keys = ScatterElements <axis = 0> (flat_scales, flat_key_scale_index, flat_key_scales)
  flat_value_scale_index = Reshape (value_scale_index, minus_one)
  flat_value_scales = Reshape (value_scale, minus_one)
  new_flat_scales =
    ScatterElements <axis = 0> (scales_with_keys, flat_value_scale_index, flat_value_scales)
  kv_scales_out = Reshape (new_flat_scales, scales_shape)

  blocks = Shape <start = 0, end = 1> (kv_cache)
  float_cache = Cast <to = 1> (kv_cache_out)
  key_plane_of_one = Slice (float_cache, zero, one, one)
  rows_then_offsets = Concat <axis = 0> (blocks, kv_heads, row, block_size)
  offsets_then_rows = Concat <axis = 0> (blocks, kv_heads, block_size, row)
  key_plane_shape = Where (transposed, rows_then_offsets, offsets_then_rows)
  key_plane = Reshape (key_plane_of_one, key_plane_shape)
  key_scales_of_one = Slice (kv_scales_out, zero, one, one)
  one_row = Concat <axis = 0> (blocks, kv_heads, one, block_size)
  one_column = Concat <axis = 0> (blocks, kv_heads, block_size, one)
  key_scales_shape = Where (transposed, one_row, one_column)
  key_scales = Reshape (key_scales_of_one, key_scales_shape)
  scaled_keys = Mul (key_plane, key_scales)
  plane_shape = Concat <axis = 0> (blocks, one, kv_heads, block_size, row)
  float_keys = Reshape (scaled_keys, plane_shape)
  value_plane = Slice (float_cache, one, two, one)
  value_scales_of_one = Slice (kv_scales_out, one, two, one)
  four = Constant <value_ints = [4]> ()
  value_scales = Unsqueeze (value_scales_of_one, four)
  float_values = Mul (value_plane, value_scales)
  floats = Concat <axis = 1> (float_keys, float_values)
  minus_one_slot = Cast <to = 6> (minus_one)
  no_slots = Expand (minus_one_slot, tokens)
"""


def function() -> onnx.FunctionProto:
    """The body of FusedPagedAttention, to be added to a model's `functions`."""
    attend = _ATTENTION.format(cache="kv_cache", cache_out="kv_cache_out", slots="slot_mapping")
    return _parsed(SCHEMA, _UNPACK + attend)


def int8_function() -> onnx.FunctionProto:
    """The body of FusedPagedAttentionInt8: all is in the cache before attention, as floats."""
    attend = _ATTENTION.format(cache="floats", cache_out="same_floats", slots="no_slots")
    return _parsed(INT8_SCHEMA, _UNPACK + _QUANTIZE + attend)


def _parsed(schema: OperatorSchema, body: str) -> onnx.FunctionProto:
    attributes = ", ".join(attribute.name for attribute in schema.attributes)
    inputs, outputs = (
        ", ".join(operand.name for operand in operands)
        for operands in (schema.inputs, schema.outputs)
    )
    function = onnx.parser.parse_function(
        f'<domain: "{DOMAIN}", opset_import: ["": 21, "{DOMAIN}": 1]>\n'
        f"{schema.onnx_name} <{attributes}> ({inputs}) => ({outputs})\n{{{body}}}"
    )
    function.doc_string = schema.doc
    return function
