"""`octavo::norm` and `octavo::norm_quantize`: RMS and layer norm, with what stands beside them."""

from __future__ import annotations

from octavo.graphs.ops.quantization import QUANTIZED
from octavo.graphs.ops.schema import Attribute, Operand, OperatorSchema

_INPUTS = (
    Operand("input", "float32", "[M, K]"),
    Operand("residual", "float32", "[M, K], added to the input first, or [0, 0] for none"),
    Operand("weight", "float32", "[K], or [0] for ones"),
    Operand("bias", "float32", "[K], or [0] for none"),
)
_SUM = Operand("sum", "float32", "input + residual [M, K]; [0, K] without a residual")
_ATTRIBUTES = (
    Attribute("epsilon", "float", "added to the mean square or the variance"),
    Attribute("centered", "int", "0: RMS norm; 1: layer norm, which subtracts the mean"),
)
_DOC = (
    "x = input + residual; RMS norm: x / sqrt(mean(x^2) + epsilon) * weight + bias; layer norm: "
    "the same of x - mean(x)."
)

NORM = OperatorSchema(
    name="norm",
    onnx_name="Norm",
    inputs=_INPUTS,
    outputs=(Operand("output", "float32", "[M, K]"), _SUM),
    attributes=_ATTRIBUTES,
    doc=_DOC,
)
NORM_QUANTIZE = OperatorSchema(
    name="norm_quantize",
    onnx_name="NormQuantize",
    inputs=_INPUTS,
    outputs=(*QUANTIZED, _SUM),
    attributes=_ATTRIBUTES,
    doc=f"{_DOC} The result is quantised as by Quantize.",
)
