"""Logits only where asked: the gather of the wanted rows moves up through what works row by row.

The last layer's MLP, its norms and the attention's projection then see the wanted rows only. A row
has the same bits either way, as no kernel's result of a row depends on the others.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from octavo.compiler.passes import matching
from octavo.compiler.passes.matching import operator_of
from octavo.compiler.passes.parameters import call
from octavo.graphs import bindings
from octavo.graphs.spec import PassRecord

_ROW_WISE = frozenset(
    {
        "aten.layer_norm",
        "aten.linear",
        "aten.rms_norm",
        "getitem",
        "octavo.activate",
        "octavo.linear_residual",
        "octavo.norm",
    }
)
# Row by row if they do not work along the rows' axis: where that argument is.
_AXIS_ARGUMENT = {
    "aten.cat": 1,
    "aten.chunk": 2,
    "aten.mean": 1,
    "aten.slice": 1,
    "aten.softmax": 1,
    "aten.split": 2,
    "aten.split_with_sizes": 2,
}


def select_rows(exported: ExportedProgram) -> tuple[ExportedProgram, PassRecord]:
    notes: list[str] = []
    skipped: list[str] = []
    for gather in list(exported.graph.nodes):
        if not _is_gather_of_wanted_rows(gather):
            continue
        moved, stops = _move_up(exported, gather)
        if moved:
            notes.append(f"{moved} nodes work on the wanted rows only, from {stops} on")
        else:
            skipped.append(f"the wanted rows are chosen from {stops}, which is not row by row")
    exported.graph_module.recompile()
    return exported, PassRecord(
        name="select_rows", matches=len(notes), notes=tuple(notes), skipped=tuple(skipped)
    )


def _is_gather_of_wanted_rows(node: fx.Node) -> bool:
    """index(x, [rows]) or index_select(x, 0, rows), rows from the program's input."""
    if operator_of(node) == "aten.index":
        indices = cast("list[Any]", node.args[1])
        rows = indices[0] if len(indices) == 1 else None
    elif operator_of(node) == "aten.index_select" and node.args[1] == 0:
        rows = node.args[2]
    else:
        return False
    while isinstance(rows, fx.Node) and operator_of(rows) in ("aten.to", "aten._to_copy"):
        rows = rows.args[0]
    return isinstance(rows, fx.Node) and rows.name == bindings.LOGITS_INDICES.name


def _move_up(exported: ExportedProgram, gather: fx.Node) -> tuple[int, str]:
    """How many nodes the gather moved over, and what it stands behind now."""
    graph, source = exported.graph, cast(fx.Node, gather.args[0])
    region = _region(graph, gather, source)
    moved: dict[fx.Node, fx.Node] = {}
    stops: dict[str, None] = {}

    def operand(node: fx.Node) -> fx.Node:
        if node not in moved and node not in region and _has_rows_of(node, source):
            arguments = (node, *gather.args[1:])
            moved[node] = call(graph, gather.target, *arguments, like=gather)
            stops[operator_of(node) or "an input"] = None
        return moved.get(node, node)

    if source not in region:
        return 0, operator_of(source)
    with graph.inserting_before(gather):
        for node in region:
            arguments, named = fx.node.map_arg((node.args, node.kwargs), operand)
            moved[node] = call(graph, node.target, *arguments, like=node, **named)
    matching.replace(exported, gather, moved[source])
    matching.remove_unused(exported, [gather])
    return len(region), ", ".join(sorted(stops))


def _region(graph: fx.Graph, gather: fx.Node, source: fx.Node) -> dict[fx.Node, None]:
    """The nodes, in order, of which nothing but the wanted rows is read in the end."""
    region: dict[fx.Node, None] = {gather: None}
    nodes = list(graph.nodes)
    for node in reversed(nodes[: nodes.index(gather)]):
        if node.users and all(user in region for user in node.users) and _is_row_wise(node, source):
            region[node] = None
    del region[gather]
    # One result of an operator moves only with the operator.
    whole = [n for n in region if operator_of(n) != "getitem" or n.args[0] in region]
    return dict.fromkeys(reversed(whole))


def _is_row_wise(node: fx.Node, source: fx.Node) -> bool:
    name = operator_of(node)
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    if not pointwise and name not in _ROW_WISE and not _works_along_another_axis(node):
        return False
    rank = _first(node).dim()
    return (
        rank > 1
        and _has_rows_of(node, source)
        and all(
            _is_constant(operand) or _has_rows_of(operand, source, rank)
            for operand in node.all_input_nodes
        )
    )


def _works_along_another_axis(node: fx.Node) -> bool:
    position = _AXIS_ARGUMENT.get(operator_of(node))
    if position is None:
        return False
    axes = matching.argument(node, position, "dim", 0)
    rank = _first(node).dim()
    return all(axis % rank for axis in (axes if isinstance(axes, (list, tuple)) else [axes]))


def _first(node: fx.Node) -> Tensor:
    """The tensor of a node, or the first of several."""
    value = node.meta["val"]
    return cast(Tensor, value[0] if isinstance(value, (list, tuple)) else value)


def _is_constant(node: fx.Node) -> bool:
    """Whether every size is known: such a tensor has no rows of tokens."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and all(isinstance(size, int) for size in value.shape)


def _has_rows_of(node: fx.Node, source: fx.Node, rank: int | None = None) -> bool:
    """Whether the first axis is that of `source`, and there are `rank` axes."""
    value = node.meta.get("val")
    if not isinstance(value, (Tensor, list, tuple)):
        return False
    first = _first(node)
    if not isinstance(first, Tensor) or not first.dim() or rank not in (None, first.dim()):
        return False
    return matching.size_key(first.shape[0]) == matching.size_key(_first(source).shape[0])
