"""The ONNX function body of `octavo::QuantizedLinear`, in standard operators only.

It turns activations and weights back into floats and multiplies these: the same up to the rounding
of float32. What is not given ([0], [0, 0], [0, 0, 0]) is filled up with zeros.
"""

from __future__ import annotations

import onnx
import onnx.parser

from octavo.graphs.ops.quantized_linear import SCHEMA

_BODY = """
<domain: "octavo", opset_import: ["": 21]>
QuantizedLinear <columns, bits, zero_point>
 (quantized, scales, sums, weight, column_scales, group_scales, group_minimums, bias, residual)
 => (output)
{
  zero = Constant <value_ints = [0]> ()
  one = Constant <value_ints = [1]> ()
  two = Constant <value_ints = [2]> ()
  minus_one = Constant <value_ints = [-1]> ()
  panel_columns = Constant <value_ints = [32]> ()
  group = Constant <value_ints = [32]> ()
  byte_bits = Constant <value_ints = [8]> ()
  sixteen = Constant <value = int32 {16}> ()
  zero_float = Constant <value_float = 0.0> ()
  columns_value = Constant <value_int: int = @columns> ()
  columns_row = Reshape (columns_value, one)
  bits_value = Constant <value_int: int = @bits> ()
  bits_row = Reshape (bits_value, one)
  zero_point_value = Constant <value_int: int = @zero_point> ()
  zero_point_float = Cast <to = 1> (zero_point_value)

  rows = Shape <start = 0, end = 1> (quantized)
  depth = Shape <start = 1, end = 2> (quantized)
  panels = Shape <start = 0, end = 1> (weight)
  padded_columns = Mul (panels, panel_columns)
  depth_groups = Div (depth, group)

  row_groups_shape = Concat <axis = 0> (rows, depth_groups, group)
  float_values = Cast <to = 1> (quantized)
  grouped_values = Reshape <allowzero = 1> (float_values, row_groups_shape)
  scale_column = Unsqueeze (scales, two)
  scaled_values = Mul (grouped_values, scale_column)
  input_shape = Concat <axis = 0> (rows, depth)
  input = Reshape <allowzero = 1> (scaled_values, input_shape)

  bytes = Cast <to = 6> (weight)
  high = Div (bytes, sixteen)
  high_part = Mul (high, sixteen)
  low = Sub (bytes, high_part)
  values_in_byte = Div (byte_bits, bits_row)
  is_byte = Equal (values_in_byte, one)
  first = Where (is_byte, bytes, low)
  first_half = Unsqueeze (first, two)
  second_half = Unsqueeze (high, two)
  halves = Concat <axis = 2> (first_half, second_half)
  values = Slice (halves, zero, values_in_byte, two)
  by_column = Transpose <perm = [0, 3, 1, 2, 4]> (values)
  groups_shape = Concat <axis = 0> (padded_columns, depth_groups, group)
  grouped_integers = Reshape (by_column, groups_shape)
  grouped_floats = Cast <to = 1> (grouped_integers)
  centred = Sub (grouped_floats, zero_point_float)

  group_count = Mul (padded_columns, depth_groups)
  group_column_shape = Concat <axis = 0> (padded_columns, depth_groups, one)
  no_groups = Expand (zero_float, group_count)
  scales_by_column = Transpose <perm = [0, 2, 1]> (group_scales)
  flat_scales = Reshape (scales_by_column, minus_one)
  float_scales = Cast <to = 1> (flat_scales)
  padded_scales = Concat <axis = 0> (float_scales, no_groups)
  all_group_scales = Slice (padded_scales, zero, group_count)
  group_scale = Reshape (all_group_scales, group_column_shape)
  minimums_by_column = Transpose <perm = [0, 2, 1]> (group_minimums)
  flat_minimums = Reshape (minimums_by_column, minus_one)
  float_minimums = Cast <to = 1> (flat_minimums)
  padded_minimums = Concat <axis = 0> (float_minimums, no_groups)
  all_minimums = Slice (padded_minimums, zero, group_count)
  minimum = Reshape (all_minimums, group_column_shape)
  no_columns = Expand (zero_float, padded_columns)
  padded_column_scales = Concat <axis = 0> (column_scales, no_columns)
  all_column_scales = Slice (padded_column_scales, zero, padded_columns)
  column_shape = Concat <axis = 0> (padded_columns, one, one)
  column_scale = Reshape (all_column_scales, column_shape)
  scale = Add (group_scale, column_scale)
  scaled = Mul (centred, scale)
  grouped_weight = Add (scaled, minimum)
  matrix_shape = Concat <axis = 0> (padded_columns, depth)
  padded_matrix = Reshape (grouped_weight, matrix_shape)
  matrix = Slice (padded_matrix, zero, columns_row, zero)
  by_depth = Transpose <perm = [1, 0]> (matrix)

  product = MatMul (input, by_depth)
  no_bias = Expand (zero_float, columns_row)
  padded_bias = Concat <axis = 0> (bias, no_bias)
  bias_row = Slice (padded_bias, zero, columns_row)
  biased = Add (product, bias_row)
  element_count = Mul (rows, columns_row)
  no_residual = Expand (zero_float, element_count)
  flat_residual = Reshape (residual, minus_one)
  padded_residual = Concat <axis = 0> (flat_residual, no_residual)
  all_residual = Slice (padded_residual, zero, element_count)
  output_shape = Concat <axis = 0> (rows, columns_row)
  residual_matrix = Reshape <allowzero = 1> (all_residual, output_shape)
  output = Add (biased, residual_matrix)
}
"""


def function() -> onnx.FunctionProto:
    """The body, to be added to a model's `functions`."""
    body = onnx.parser.parse_function(_BODY)
    body.doc_string = SCHEMA.doc
    if list(body.input) != [operand.name for operand in SCHEMA.inputs]:
        raise AssertionError("the function body and the schema of QuantizedLinear differ")
    return body
