"""How activations are quantised, and `octavo::quantize`.

A row is cut into groups of 32 along its depth. Each has one scale: one scale a token loses 6 % of
perplexity to outliers, groups of 64 some 0.3 %, groups of 32 about half of that. Quantised weights
are unsigned with a zero point, so a product needs the sum of the activations:
`w = scale * (u - zero_point) + minimum`.
"""

from __future__ import annotations

from octavo.graphs.ops.schema import Operand, OperatorSchema

GROUP = 32  # values along the depth that share a scale
LARGEST = 127  # quantised activations lie in -127..127

QUANTIZED = (
    Operand("quantized", "int8", "[M, Kp]; Kp is K rounded up to 32, filled up with zeros"),
    Operand("scales", "float32", "[M, Kp / 32], the largest magnitude of a group / 127"),
    Operand("sums", "int32", "[M, Kp / 32], the sums of a group's quantised values"),
)

SCHEMA = OperatorSchema(
    name="quantize",
    onnx_name="Quantize",
    inputs=(Operand("input", "float32", "[M, K]"),),
    outputs=QUANTIZED,
    attributes=(),
    doc=(
        "With a group's largest magnitude m: scale = m / 127, and a value x becomes "
        "round(x * (127 / m)), halves to even, or 0 where m is 0, kept within -127..127."
    ),
)
