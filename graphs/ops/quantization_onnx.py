"""The ONNX function body of `octavo::Quantize`, in standard operators only."""

from __future__ import annotations

import onnx
import onnx.parser

from octavo.graphs.ops.quantization import SCHEMA

# Shapes are computed, as a step may have no rows: a -1 could not be inferred then. The inverse of
# what is smaller than `smallest` is infinite, and infinity times a zero of its group no number.
_BODY = """
<domain: "octavo", opset_import: ["": 21]>
Quantize (input) => (quantized, scales, sums)
{
  last = Constant <value_ints = [-1]> ()
  group = Constant <value_ints = [32]> ()
  limit = Constant <value_float = 127.0> ()
  minus_limit = Constant <value_float = -127.0> ()
  smallest = Constant <value_float = 3.7323e-37> ()

  rows = Shape <start = 0, end = 1> (input)
  depth = Shape <start = 1, end = 2> (input)
  minus_depth = Neg (depth)
  missing = Mod (minus_depth, group)
  in_front = Constant <value_ints = [0, 0, 0]> ()
  pads = Concat <axis = 0> (in_front, missing)
  padded = Pad (input, pads)
  padded_depth = Add (depth, missing)
  padded_shape = Concat <axis = 0> (rows, padded_depth)
  group_count = Div (padded_depth, group)
  group_shape = Concat <axis = 0> (rows, group_count, group)
  groups = Reshape <allowzero = 1> (padded, group_shape)

  magnitudes = Abs (groups)
  largest = ReduceMax <keepdims = 1> (magnitudes, last)
  scale_column = Div (largest, limit)
  scales = Squeeze (scale_column, last)
  divisor = Max (largest, smallest)
  inverse = Div (limit, divisor)
  scaled = Mul (groups, inverse)
  rounded = Round (scaled)
  integers = Clip (rounded, minus_limit, limit)
  integer_rows = Reshape <allowzero = 1> (integers, padded_shape)
  quantized = Cast <to = 3> (integer_rows)

  float_sums = ReduceSum <keepdims = 0> (integers, last)
  sums = Cast <to = 6> (float_sums)
}
"""


def function() -> onnx.FunctionProto:
    """The body, to be added to a model's `functions`."""
    body = onnx.parser.parse_function(_BODY)
    body.doc_string = SCHEMA.doc
    return body
