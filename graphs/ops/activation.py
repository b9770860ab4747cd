"""`octavo::activate` and `octavo::activate_quantize`: an activation, gated or not."""

from __future__ import annotations

from enum import IntEnum

from octavo.graphs.ops.quantization import QUANTIZED
from octavo.graphs.ops.schema import Attribute, Operand, OperatorSchema


class Function(IntEnum):
    """Values of the attribute `function`."""

    SILU = 0  # x * sigmoid(x)
    GELU = 1  # x / 2 * (1 + erf(x / sqrt(2)))
    GELU_TANH = 2  # x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))
    RELU = 3
    RELU_SQUARED = 4


_INPUTS = (Operand("input", "float32", "[M, K], or [M, 2 K] if gated: the gate, then the factor"),)
_ATTRIBUTES = (
    Attribute("function", "int", "a value of `Function`"),
    Attribute("gated", "int", "1: function(gate) * factor; 0: function(input)"),
)

ACTIVATE = OperatorSchema(
    name="activate",
    onnx_name="Activate",
    inputs=_INPUTS,
    outputs=(Operand("output", "float32", "[M, K]"),),
    attributes=_ATTRIBUTES,
    doc="An activation function, of the first half times the second if gated.",
)
ACTIVATE_QUANTIZE = OperatorSchema(
    name="activate_quantize",
    onnx_name="ActivateQuantize",
    inputs=_INPUTS,
    outputs=QUANTIZED,
    attributes=_ATTRIBUTES,
    doc="Activate, then Quantize.",
)
