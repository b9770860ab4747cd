"""Paged attention, plain and fused: the backend says how the cache's keys lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import onnx_ir as ir

from octavo.backends.onnx_lowering.lowering import LoweringContext, lowers
from octavo.graphs.ops import fused_paged_attention, paged_attention
from octavo.graphs.ops.schema import DOMAIN, OperatorSchema


def _attention(schema: OperatorSchema) -> Any:
    def rule(c: LoweringContext, *arguments: Any) -> tuple[ir.Value, ...]:
        operands = arguments[: len(schema.inputs)]
        names = [attribute.name for attribute in schema.attributes]
        attributes = dict(zip(names, arguments[len(schema.inputs) :], strict=True))
        attributes["k_transposed"] = int(c.layouts.k_transposed)
        return c.builder.nodes_of(
            schema.onnx_name,
            cast("Sequence[ir.Value]", operands),
            len(schema.outputs),
            domain=DOMAIN,
            **attributes,
        )

    return rule


for _schema in (
    paged_attention.SCHEMA,
    fused_paged_attention.SCHEMA,
    fused_paged_attention.INT8_SCHEMA,
):
    lowers(f"octavo.{_schema.name}.default")(_attention(_schema))
