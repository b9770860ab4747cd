"""In-place operators become functional ones, since a compiled graph has values, not storage.

What they would have filled starts as zeros instead of uninitialised memory.
"""

from __future__ import annotations

import warnings

import torch
from torch import fx
from torch.export import ExportedProgram

from octavo.graphs.spec import PassRecord


def functionalize(exported: ExportedProgram) -> tuple[ExportedProgram, PassRecord]:
    """Retraces the graph only if some node mutates: a retrace costs as much as the capture."""
    mutating = [node for node in exported.graph.nodes if mutates(node)]
    if mutating:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = exported.run_decompositions({})
        _zero_uninitialised(exported)
    return exported, PassRecord(name="functionalize", matches=len(mutating))


def mutates(node: fx.Node) -> bool:
    """Whether a node writes to one of its inputs."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _zero_uninitialised(exported: ExportedProgram) -> None:
    for node in exported.graph.nodes:
        if node.target is torch.ops.aten.new_empty.default:
            node.target = torch.ops.aten.new_zeros.default
        elif node.target is torch.ops.aten.empty_like.default:
            node.target = torch.ops.aten.zeros_like.default
        elif node.target is torch.ops.aten.empty.memory_format:
            node.target = torch.ops.aten.zeros.default
            node.kwargs = {k: v for k, v in node.kwargs.items() if k != "memory_format"}
    exported.graph_module.recompile()
