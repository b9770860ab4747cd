"""The ONNX function bodies of `octavo::Norm` and `octavo::NormQuantize`."""

from __future__ import annotations

import onnx
import onnx.parser

from octavo.graphs.ops.norm import NORM, NORM_QUANTIZE

# What is not given is filled up: the residual and the bias with zeros, the weight with ones.
_NORM = """
<domain: "octavo", opset_import: ["": 21]>
Norm <epsilon, centered> (input, residual, weight, bias) => (output, sum)
{
  zero = Constant <value_ints = [0]> ()
  last = Constant <value_ints = [-1]> ()
  zeros = Constant <value_ints = [0, 0]> ()
  zero_float = Constant <value_float = 0.0> ()
  one_float = Constant <value_float = 1.0> ()
  epsilon_value = Constant <value_float: float = @epsilon> ()
  centered_value = Constant <value_int: int = @centered> ()
  is_centered = Cast <to = 9> (centered_value)

  shape = Shape (input)
  depth = Shape <start = 1, end = 2> (input)
  residual_shape = Shape (residual)
  missing = Sub (shape, residual_shape)
  pads = Concat <axis = 0> (zeros, missing)
  padded_residual = Pad (residual, pads)
  x = Add (input, padded_residual)
  residual_rows = Shape <start = 0, end = 1> (residual)
  sum = Slice (x, zero, residual_rows, zero)

  mean = ReduceMean <keepdims = 1> (x, last)
  center = Where (is_centered, mean, zero_float)
  shifted = Sub (x, center)
  squares = Mul (shifted, shifted)
  mean_square = ReduceMean <keepdims = 1> (squares, last)
  raised = Add (mean_square, epsilon_value)
  root = Sqrt (raised)
  scale = Reciprocal (root)
  normalised = Mul (shifted, scale)

  no_weight = Expand (one_float, depth)
  padded_weight = Concat <axis = 0> (weight, no_weight)
  weight_row = Slice (padded_weight, zero, depth)
  no_bias = Expand (zero_float, depth)
  padded_bias = Concat <axis = 0> (bias, no_bias)
  bias_row = Slice (padded_bias, zero, depth)
  weighted = Mul (normalised, weight_row)
  output = Add (weighted, bias_row)
}
"""
_NORM_QUANTIZE = """
<domain: "octavo", opset_import: ["": 21, "octavo": 1]>
NormQuantize <epsilon, centered> (input, residual, weight, bias) => (quantized, scales, sums, sum)
{
  output, sum = octavo.Norm <epsilon: float = @epsilon, centered: int = @centered>
    (input, residual, weight, bias)
  quantized, scales, sums = octavo.Quantize (output)
}
"""


def function() -> onnx.FunctionProto:
    """The body of Norm, to be added to a model's `functions`."""
    body = onnx.parser.parse_function(_NORM)
    body.doc_string = NORM.doc
    return body


def quantize_function() -> onnx.FunctionProto:
    """The body of NormQuantize, which calls Norm and Quantize."""
    body = onnx.parser.parse_function(_NORM_QUANTIZE)
    body.doc_string = NORM_QUANTIZE.doc
    return body
