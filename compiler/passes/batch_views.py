"""Views that add or drop HF's batch axis of one say so, for `flatten_batch` to see.

`view(x, [1, T, K])` becomes `unsqueeze(view(x, [T, K]), 0)`, and `view(y, [T, K])` of y [1, T, K]
becomes `view(select(y, 0, 0), [T, K])`. What is left of them then changes no shape, and goes.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import fx
from torch.export import ExportedProgram

from octavo.compiler.passes import matching
from octavo.compiler.passes.parameters import call
from octavo.graphs.spec import PassRecord

_ATEN = torch.ops.aten
_VIEWS = (_ATEN.view.default, _ATEN.reshape.default)


def split_batch_views(exported: ExportedProgram) -> tuple[ExportedProgram, PassRecord]:
    graph, matches = exported.graph, 0
    for node in list(graph.nodes):
        if node.target not in _VIEWS:
            continue
        source, sizes = cast("tuple[fx.Node, list[Any]]", node.args)
        before, after = _leads_with_one(source), _leads_with_one(node)
        if before == after:
            continue
        with graph.inserting_before(node):
            if after:
                # A -1 stands for the same size: the product of all sizes is what it was.
                inner = call(graph, node.target, source, sizes[1:], like=node)
                view = call(graph, _ATEN.unsqueeze.default, inner, 0, like=node)
            else:
                flat = call(graph, _ATEN.select.int, source, 0, 0, like=node)
                view = call(graph, node.target, flat, sizes, like=node)
        matching.replace(exported, node, view)
        graph.erase_node(node)
        matches += 1
    exported.graph_module.recompile()
    return exported, PassRecord(name="split_batch_views", matches=matches)


def remove_identity_views(exported: ExportedProgram) -> tuple[ExportedProgram, PassRecord]:
    graph, matches = exported.graph, 0
    for node in list(graph.nodes):
        if node.target in _VIEWS and matching.same_shape(node, node.args[0]):
            matching.replace(exported, node, cast(fx.Node, node.args[0]))
            graph.erase_node(node)
            matches += 1
    exported.graph_module.recompile()
    return exported, PassRecord(name="remove_identity_views", matches=matches)


def _leads_with_one(node: fx.Node) -> bool:
    """Whether a tensor is [1, ...] with more axes."""
    value = matching.tensor_of(node)
    if value is None or value.dim() < 2:
        return False
    return isinstance(value.shape[0], int) and value.shape[0] == 1
