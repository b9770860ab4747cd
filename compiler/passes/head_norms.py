"""RMS norms that a fused attention layer can compute for the heads of queries and keys."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx
from torch.export import ExportedProgram

from octavo.compiler.passes import fuse_norms


@dataclass(frozen=True)
class HeadNorm:
    """`last` = x / sqrt(mean(x^2) + epsilon) * weight, over the last axis."""

    last: fx.Node
    x: fx.Node
    weight: fx.Node  # f32 [D]
    epsilon: float


def head_norms(exported: ExportedProgram) -> dict[fx.Node, HeadNorm]:
    """All RMS norms with a weight, by the node of their result."""
    found = {}
    for node in list(exported.graph.nodes):
        try:
            norm = fuse_norms.match_norm(exported, node)
        except fuse_norms.UnmatchedNormError:
            continue
        if norm is not None and norm.weight is not None and not (norm.centered or norm.bias):
            found[norm.last] = HeadNorm(norm.last, norm.x, norm.weight, norm.epsilon)
    return found
