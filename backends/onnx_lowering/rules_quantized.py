"""Quantised linear layers: their weights are parameters in the packed layout already."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from octavo.backends.onnx_lowering.lowering import LoweringContext, lowers
from octavo.graphs.ops.quantized_linear import SCHEMA
from octavo.graphs.ops.schema import DOMAIN


@lowers(f"octavo.{SCHEMA.name}.default")
def _quantized_linear(c: LoweringContext, *arguments: Any) -> ir.Value:
    operands = arguments[: len(SCHEMA.inputs)]
    names = [attribute.name for attribute in SCHEMA.attributes]
    attributes = dict(zip(names, arguments[len(SCHEMA.inputs) :], strict=True))
    return c.op(SCHEMA.onnx_name, *operands, domain=DOMAIN, **attributes)
