"""The ONNX function bodies of Octavo's operators, by the name of the node that they stand for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import onnx

from octavo.graphs.ops import (
    accept_onnx,
    activation_onnx,
    fused_paged_attention_onnx,
    linear_onnx,
    norm_onnx,
    paged_attention_onnx,
    quantization_onnx,
    quantized_linear_onnx,
)
from octavo.graphs.ops.accept import SCHEMA as ACCEPT
from octavo.graphs.ops.activation import ACTIVATE, ACTIVATE_QUANTIZE
from octavo.graphs.ops.fused_paged_attention import INT8_SCHEMA as FUSED_INT8
from octavo.graphs.ops.fused_paged_attention import SCHEMA as FUSED
from octavo.graphs.ops.linear import SCHEMA as LINEAR
from octavo.graphs.ops.norm import NORM, NORM_QUANTIZE
from octavo.graphs.ops.paged_attention import SCHEMA as PAGED_ATTENTION
from octavo.graphs.ops.quantization import SCHEMA as QUANTIZE
from octavo.graphs.ops.quantized_linear import SCHEMA as QUANTIZED_LINEAR
from octavo.graphs.ops.schema import DOMAIN

FUNCTIONS: dict[str, Callable[[], onnx.FunctionProto]] = {
    ACCEPT.onnx_name: accept_onnx.function,
    ACTIVATE.onnx_name: activation_onnx.function,
    ACTIVATE_QUANTIZE.onnx_name: activation_onnx.quantize_function,
    FUSED.onnx_name: fused_paged_attention_onnx.function,
    FUSED_INT8.onnx_name: fused_paged_attention_onnx.int8_function,
    LINEAR.onnx_name: linear_onnx.function,
    NORM.onnx_name: norm_onnx.function,
    NORM_QUANTIZE.onnx_name: norm_onnx.quantize_function,
    PAGED_ATTENTION.onnx_name: paged_attention_onnx.function,
    QUANTIZE.onnx_name: quantization_onnx.function,
    QUANTIZED_LINEAR.onnx_name: quantized_linear_onnx.function,
}


def bodies_of(op_types: Iterable[str]) -> list[onnx.FunctionProto]:
    """The bodies of those operators that are ours, each after what it calls in turn.

    onnx's evaluator, unlike ONNX Runtime, needs that order.
    """
    bodies: dict[str, onnx.FunctionProto] = {}

    def add(name: str) -> None:
        if name in FUNCTIONS and name not in bodies:
            body = FUNCTIONS[name]()
            for called in _called(body.node):
                add(called)
            bodies[name] = body

    for name in sorted(set(op_types)):
        add(name)
    return list(bodies.values())


def _called(nodes: Iterable[onnx.NodeProto]) -> Iterator[str]:
    for node in nodes:
        if node.domain == DOMAIN:
            yield node.op_type
        for attribute in node.attribute:
            yield from _called(attribute.g.node)
