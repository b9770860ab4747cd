"""`octavo::quantized_linear`: a linear layer of 8- or 4-bit weights on quantised activations."""

from __future__ import annotations

from octavo.graphs.ops.quantization import QUANTIZED
from octavo.graphs.ops.schema import Attribute, Operand, OperatorSchema

PANEL = 32  # columns of the output whose weights lie side by side
DEPTH = 4  # values along the depth that lie side by side: one integer dot product

SCHEMA = OperatorSchema(
    name="quantized_linear",
    onnx_name="QuantizedLinear",
    inputs=(
        *QUANTIZED,
        Operand(
            "weight",
            "uint8",
            "8 bits: [P, Kp / 4, 32, 4]; 4 bits: [P, Kp / 8, 32, 4], the low half of a byte for "
            "the first 4 of 8 values along the depth, the high half for the others; P = "
            "ceil(N / 32) panels of 32 columns; what is not in the matrix is the zero point",
        ),
        Operand("column_scales", "float32", "[N], or [0] if scales are grouped"),
        Operand("group_scales", "float16", "[P, Kp / 32, 32], or [0, 0, 0] for one scale a column"),
        Operand("group_minimums", "float16", "[P, Kp / 32, 32], or [0, 0, 0] for none"),
        Operand("bias", "float32", "[N], or [0] for none"),
        Operand("residual", "float32", "[M, N], or [0, 0] for none"),
    ),
    outputs=(Operand("output", "float32", "[M, N]"),),
    attributes=(
        Attribute("columns", "int", "N"),
        Attribute("bits", "int", "4 or 8"),
        Attribute("zero_point", "int", "subtracted from every weight"),
    ),
    doc=(
        "output = x @ w + bias + residual, where x = quantized * scale of its group of 32 and "
        "w[k, n] = scale * (weight - zero_point) + minimum, with the column's scale and no minimum "
        "or those of the group along k. Products within a group are summed as integers; the "
        "groups are added one after the other in float32."
    ),
)
