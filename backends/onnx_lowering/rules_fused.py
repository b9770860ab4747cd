"""What the fusion passes write: norms, activations, quantisation, linear layers with a residual."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import onnx_ir as ir

from octavo.backends.onnx_lowering.lowering import LoweringContext, lowers
from octavo.graphs.ops import accept, activation, norm, quantization
from octavo.graphs.ops.linear import LINEAR_RESIDUAL
from octavo.graphs.ops.linear import SCHEMA as LINEAR
from octavo.graphs.ops.schema import DOMAIN, OperatorSchema


def _same_operator(schema: OperatorSchema) -> Any:
    """The ONNX operator has the tensors and attributes of the torch operator."""

    def rule(c: LoweringContext, *arguments: Any) -> ir.Value | tuple[ir.Value, ...]:
        operands = cast("Sequence[ir.Value]", arguments[: len(schema.inputs)])
        names = [attribute.name for attribute in schema.attributes]
        attributes = dict(zip(names, arguments[len(schema.inputs) :], strict=True))
        results = c.builder.nodes_of(
            schema.onnx_name, operands, len(schema.outputs), domain=DOMAIN, **attributes
        )
        return results if len(results) > 1 else results[0]

    return rule


for _schema in (
    accept.SCHEMA,
    activation.ACTIVATE,
    activation.ACTIVATE_QUANTIZE,
    norm.NORM,
    norm.NORM_QUANTIZE,
    quantization.SCHEMA,
):
    lowers(f"octavo.{_schema.name}.default")(_same_operator(_schema))


@lowers(f"octavo.{LINEAR_RESIDUAL.name}.default")
def _linear_residual(
    c: LoweringContext, rows: ir.Value, weight: ir.Value, bias: ir.Value, residual: ir.Value
) -> ir.Value:
    columns = int(c.fake.shape[1])
    packed = c.builder.packed(weight, transposed=False) if c.layouts.packed_linear else None
    if packed is not None:
        return c.op(LINEAR.onnx_name, rows, packed, bias, residual, domain=DOMAIN, columns=columns)
    has_bias = int(c.fake_of(2).shape[0]) > 0
    product = c.op("Gemm", rows, weight, bias if has_bias else None, transB=1)
    return c.op("Add", product, residual)
