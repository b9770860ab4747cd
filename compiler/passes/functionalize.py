"""In-place operators become functional ones, since a compiled graph has values, not storage."""

from __future__ import annotations

import warnings

import torch
from torch import fx
from torch.export import ExportedProgram

from octavo.backends.manifest import PassRecord


def functionalize(exported: ExportedProgram) -> tuple[ExportedProgram, PassRecord]:
    """Retraces the graph only if some node mutates, since a retrace costs as much as the capture."""
    mutating = [node for node in exported.graph.nodes if _mutates(node)]
    if mutating:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = exported.run_decompositions({})
    return exported, PassRecord(name="functionalize", matches=len(mutating))


def _mutates(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
