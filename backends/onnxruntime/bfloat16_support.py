"""Nodes for which ONNX Runtime has no CUDA kernel in bfloat16, though it has one in float16.

Source: `docs/OperatorKernels.md` of ONNX Runtime, the section of the CUDA provider.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from octavo.backends.base import UnsupportedNode
from octavo.backends.onnx_lowering.lowering import target_name

if TYPE_CHECKING:
    from torch import fx

    from octavo.graphs.program import CapturedProgram

# ATen operator -> the ONNX operator without a kernel that it is lowered to.
_WITHOUT_KERNEL = {
    "amax": "ReduceMax",
    "ceil": "Ceil",
    "clamp": "Clip",
    "clamp_max": "Clip",
    "clamp_min": "Clip",
    "cos": "Cos",
    "cumsum": "CumSum",
    "eq": "Equal",
    "floor": "Floor",
    "ge": "GreaterOrEqual",
    "gt": "Greater",
    "le": "LessOrEqual",
    "log": "Log",
    "lt": "Less",
    "mean": "ReduceMean",
    "ne": "Equal",
    "reciprocal": "Reciprocal",
    "round": "Round",
    "rsqrt": "Reciprocal",
    "sin": "Sin",
    "softplus": "Softplus",
    "topk": "TopK",
}


def unsupported_in_bfloat16(program: CapturedProgram) -> Iterator[UnsupportedNode]:
    for node in program.exported.graph.nodes:
        operator = _operator(node)
        if operator in _WITHOUT_KERNEL and _is_bfloat16(node):
            reason = (
                f"ONNX Runtime has no CUDA kernel of {_WITHOUT_KERNEL[operator]} in bfloat16 "
                "(build with --dtype float16)"
            )
            yield UnsupportedNode(node.name, target_name(node), reason)


def _operator(node: fx.Node) -> str:
    """`clamp` of `aten.clamp.default`; empty for what is no ATen call."""
    name = target_name(node) if node.op == "call_function" else ""
    if name == "aten.clamp.Tensor":  # lowered to Max and Min, which have kernels
        return ""
    parts = name.split(".")
    return parts[1] if parts[0] == "aten" else ""


def _is_bfloat16(node: fx.Node) -> bool:
    import torch

    fakes = (argument.meta.get("val") for argument in node.all_input_nodes)
    return any(isinstance(f, torch.Tensor) and f.dtype == torch.bfloat16 for f in fakes)
