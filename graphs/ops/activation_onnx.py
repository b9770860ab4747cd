"""The ONNX function bodies of `octavo::Activate` and `octavo::ActivateQuantize`."""

from __future__ import annotations

import onnx
import onnx.parser

from octavo.graphs.ops.activation import ACTIVATE, ACTIVATE_QUANTIZE, Function

# A function body has no branches on attributes: every activation is computed, and one is chosen.
# Without a gate the factor is filled up with ones.
_ACTIVATE = f"""
<domain: "octavo", opset_import: ["": 21]>
Activate <function, gated> (input) => (output)
{{
  zero = Constant <value_ints = [0]> ()
  one = Constant <value_ints = [1]> ()
  one_float = Constant <value_float = 1.0> ()
  function_value = Constant <value_int: int = @function> ()
  gated_value = Constant <value_int: int = @gated> ()

  depth = Shape <start = 1, end = 2> (input)
  halves = Add (gated_value, one)
  width = Div (depth, halves)
  x = Slice (input, zero, width, one)
  given_factor = Slice (input, width, depth, one)
  factor_width = Sub (depth, width)
  missing = Sub (width, factor_width)
  in_front = Constant <value_ints = [0, 0, 0]> ()
  pads = Concat <axis = 0> (in_front, missing)
  factor = Pad (given_factor, pads, one_float)

  sigmoid = Sigmoid (x)
  silu = Mul (x, sigmoid)

  half = Constant <value_float = 0.5> ()
  half_x = Mul (x, half)
  erf_factor = Constant <value_float = 0.70710678> ()
  erf_argument = Mul (x, erf_factor)
  erf = Erf (erf_argument)
  one_and_erf = Add (erf, one_float)
  gelu = Mul (half_x, one_and_erf)

  square = Mul (x, x)
  cube = Mul (square, x)
  cube_factor = Constant <value_float = 0.044715> ()
  small_cube = Mul (cube, cube_factor)
  bent_x = Add (x, small_cube)
  tanh_factor = Constant <value_float = 0.79788456> ()
  tanh_argument = Mul (bent_x, tanh_factor)
  tanh = Tanh (tanh_argument)
  one_and_tanh = Add (tanh, one_float)
  gelu_tanh = Mul (half_x, one_and_tanh)

  relu = Relu (x)
  relu_squared = Mul (relu, relu)
  silu_value = Constant <value_int = {Function.SILU}> ()
  gelu_value = Constant <value_int = {Function.GELU}> ()
  gelu_tanh_value = Constant <value_int = {Function.GELU_TANH}> ()
  relu_value = Constant <value_int = {Function.RELU}> ()
  is_silu = Equal (function_value, silu_value)
  is_gelu = Equal (function_value, gelu_value)
  is_gelu_tanh = Equal (function_value, gelu_tanh_value)
  is_relu = Equal (function_value, relu_value)
  any_relu = Where (is_relu, relu, relu_squared)
  not_silu_or_gelu = Where (is_gelu_tanh, gelu_tanh, any_relu)
  not_silu = Where (is_gelu, gelu, not_silu_or_gelu)
  activated = Where (is_silu, silu, not_silu)
  output = Mul (activated, factor)
}}
"""
_ACTIVATE_QUANTIZE = """
<domain: "octavo", opset_import: ["": 21, "octavo": 1]>
ActivateQuantize <function, gated> (input) => (quantized, scales, sums)
{
  output = octavo.Activate <function: int = @function, gated: int = @gated> (input)
  quantized, scales, sums = octavo.Quantize (output)
}
"""


def function() -> onnx.FunctionProto:
    """The body of Activate, to be added to a model's `functions`."""
    body = onnx.parser.parse_function(_ACTIVATE)
    body.doc_string = ACTIVATE.doc
    return body


def quantize_function() -> onnx.FunctionProto:
    """The body of ActivateQuantize, which calls Activate and Quantize."""
    body = onnx.parser.parse_function(_ACTIVATE_QUANTIZE)
    body.doc_string = ACTIVATE_QUANTIZE.doc
    return body
