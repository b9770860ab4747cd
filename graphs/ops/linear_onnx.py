"""The ONNX function body of `octavo::Linear`, in standard operators only."""

from __future__ import annotations

import onnx
import onnx.parser

from octavo.graphs.ops.linear import SCHEMA

_BODY = """
<domain: "octavo", opset_import: ["": 21]>
Linear <columns> (input, weight, bias, residual) => (output)
{
  zero = Constant <value_ints = [0]> ()
  one = Constant <value_ints = [1]> ()
  one_row = Constant <value_ints = [1]> ()
  zero_float = Constant <value_float = 0.0> ()
  column_count = Constant <value_int: int = @columns> ()
  columns_row = Reshape (column_count, one_row)
  by_depth = Transpose <perm = [1, 0, 2]> (weight)
  matrix_shape = Constant <value_ints = [0, -1]> ()
  padded_matrix = Reshape (by_depth, matrix_shape)
  matrix = Slice (padded_matrix, zero, columns_row, one)
  product = MatMul (input, matrix)
  no_bias = Expand (zero_float, columns_row)
  padded_bias = Concat <axis = 0> (bias, no_bias)
  bias_row = Slice (padded_bias, zero, columns_row)
  biased = Add (product, bias_row)
  flat_shape = Constant <value_ints = [-1]> ()
  flat_residual = Reshape (residual, flat_shape)
  flat_product = Reshape (biased, flat_shape)
  flat_size = Shape (flat_product)
  no_residual = Expand (zero_float, flat_size)
  padded_residual = Concat <axis = 0> (flat_residual, no_residual)
  cut_residual = Slice (padded_residual, zero, flat_size)
  flat_output = Add (flat_product, cut_residual)
  output_shape = Shape (product)
  output = Reshape (flat_output, output_shape)
}
"""


def function() -> onnx.FunctionProto:
    """The body, to be added to a model's `functions`."""
    body = onnx.parser.parse_function(_BODY)
    body.doc_string = SCHEMA.doc
    return body
