"""Checks made while tracing, operators that do nothing at inference, and what nobody reads, go."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from octavo.compiler.passes.functionalize import mutates
from octavo.graphs.spec import PassRecord

_ASSERTIONS = frozenset(
    {
        "aten._assert_async.msg",
        "aten._assert_scalar.default",
        "aten._assert_tensor_metadata.default",
        "aten.sym_constrain_range.default",
        "aten.sym_constrain_range_for_size.default",
    }
)
_IDENTITIES = frozenset(
    {
        "aten.alias.default",
        "aten.clone.default",
        "aten.contiguous.default",
        "aten.detach.default",
        "aten.detach_.default",
        "aten.dropout.default",
        "aten.lift_fresh_copy.default",
    }
)
_CASTS = frozenset(
    {
        "aten._to_copy.default",
        "aten.to.device",
        "aten.to.dtype",
        "aten.to.dtype_layout",
        "aten.type_as.default",
    }
)


def remove_dead_code(exported: ExportedProgram) -> tuple[ExportedProgram, PassRecord]:
    graph = exported.graph
    before = len(graph.nodes)
    for node in list(graph.nodes):
        name = str(node.target)
        if name in _ASSERTIONS:
            graph.erase_node(node)
        elif name in _IDENTITIES or (name in _CASTS and _keeps_dtype(node)):
            source = cast(fx.Node, node.args[0])
            node.replace_all_uses_with(source)
            exported.graph_signature.replace_all_uses(node.name, source.name)
            graph.erase_node(node)
    # Reversed, so that a chain that nobody reads goes in one sweep.
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not mutates(node):
            graph.erase_node(node)
    exported.graph_module.recompile()
    return exported, PassRecord(name="dead_code", matches=before - len(graph.nodes))


def _keeps_dtype(node: fx.Node) -> bool:
    source = cast(fx.Node, node.args[0]).meta.get("val")
    result = node.meta.get("val")
    return (
        isinstance(source, Tensor)
        and isinstance(result, Tensor)
        and source.dtype == result.dtype
        and source.device == result.device
        and source.layout == torch.strided
    )
