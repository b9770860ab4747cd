"""GPT-2's Conv1D, `addmm(bias, x, weight)`, is a linear layer whose weight lies the other way."""

from __future__ import annotations

from typing import cast

import torch
from torch import fx
from torch.export import ExportedProgram

from octavo.compiler.passes import matching
from octavo.compiler.passes.parameters import (
    add_parameter,
    call,
    parameter,
    parameter_name,
    remove_unused_parameters,
)
from octavo.graphs.spec import PassRecord

_ATEN = torch.ops.aten


def conv1d(exported: ExportedProgram) -> tuple[ExportedProgram, PassRecord]:
    graph, matches = exported.graph, 0
    for node in list(graph.nodes):
        if node.target is not _ATEN.addmm.default or node.kwargs:  # beta, alpha
            continue
        bias, rows, weight = cast("tuple[fx.Node, fx.Node, fx.Node]", node.args)
        tensor = parameter(exported, weight)
        if tensor is None or not matching.is_vector(bias, tensor.shape[1]):
            continue
        name = f"{parameter_name(exported, weight)}.transposed"
        transposed = add_parameter(exported, name, tensor.t(), weight)
        with graph.inserting_before(node):
            linear = call(graph, _ATEN.linear.default, rows, transposed, bias, like=node)
        matching.replace(exported, node, linear)
        graph.erase_node(node)
        matches += 1
    remove_unused_parameters(exported)
    exported.graph_module.recompile()
    return exported, PassRecord(name="conv1d", matches=matches)
