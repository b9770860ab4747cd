"""`octavo::linear`: a linear layer whose weights are packed ahead of time.

The checkpoint's layout would be packed by every process that loads the engine, which takes longer
than all else of a start and keeps the weights in memory twice. Packed, they are mapped as they are.
"""

from __future__ import annotations

from octavo.graphs.ops.schema import Attribute, Operand, OperatorSchema

PANEL = 16  # columns of the output whose weights lie side by side

SCHEMA = OperatorSchema(
    name="linear",
    onnx_name="Linear",
    inputs=(
        Operand("input", "float32", "[M, K]"),
        Operand("weight", "float32", "[ceil(N / 16), K, 16], the last panel padded with zeros"),
        Operand("bias", "float32", "[N], or [0] for none"),
        Operand("residual", "float32", "[M, N], or [0, 0] for none"),
    ),
    outputs=(Operand("output", "float32", "[M, N]"),),
    attributes=(Attribute("columns", "int", "N"),),
    doc="output = input @ weight + bias + residual; weight[p, k, c] is column 16 p + c of row k.",
)

# The same with the checkpoint's layout, as the passes write it: `packed` is a choice of a backend.
LINEAR_RESIDUAL = OperatorSchema(
    name="linear_residual",
    onnx_name="LinearResidual",
    inputs=(
        Operand("input", "float32", "[M, K]"),
        Operand("weight", "float32", "[N, K]"),
        Operand("bias", "float32", "[N], or [0] for none"),
        Operand("residual", "float32", "[M, N]"),
    ),
    outputs=(Operand("output", "float32", "[M, N]"),),
    attributes=(),
    doc="output = input @ weight.T + bias + residual.",
)
