"""An addition to a linear layer's result becomes part of the layer: `octavo.linear_residual`."""

from __future__ import annotations

from collections import Counter
from typing import cast

from torch import fx
from torch.export import ExportedProgram

from octavo.compiler.passes import matching
from octavo.compiler.passes.matching import operator_of
from octavo.compiler.passes.parameters import call
from octavo.graphs.ops.linear_torch import OPERATOR as LINEAR_RESIDUAL
from octavo.graphs.spec import PassRecord


def fuse_residuals(exported: ExportedProgram) -> tuple[ExportedProgram, PassRecord]:
    skipped: Counter[str] = Counter()
    matches = 0
    for node in list(exported.graph.nodes):
        pair = adds_to_a_linear(node)
        if pair is not None:
            _fuse(exported, node, *pair)
            matches += 1
        else:
            skipped.update(_reasons(node))
    exported.graph_module.recompile()
    reasons = tuple(f"{count} x {reason}" for reason, count in sorted(skipped.items()))
    return exported, PassRecord(name="fuse_residuals", matches=matches, skipped=reasons)


def adds_to_a_linear(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """(linear, residual) if the node adds them, both [M, N], and is the layer's only reader."""
    addends = matching.summands(node)
    if addends is None or addends[0] is addends[1]:
        return None
    if not all(matching.is_rows(a) and matching.same_shape(a, node) for a in addends):
        return None
    first, second = cast("tuple[fx.Node, fx.Node]", addends)
    # Of two layers the later one adds the earlier one's result.
    for linear, residual in sorted([(first, second), (second, first)], reverse=True):
        if _is_linear(linear) and matching.only_user(linear) is node:
            return linear, residual
    return None


def _is_linear(node: fx.Node) -> bool:
    return operator_of(node) == "aten.linear" and matching.is_rows(node.args[1])


def _reasons(node: fx.Node) -> list[str]:
    """Why an addition to a linear layer's result stays."""
    addends = matching.summands(node) or ()
    linears = [a for a in addends if isinstance(a, fx.Node) and _is_linear(a)]
    if not linears:
        return []
    if all(matching.only_user(linear) is node for linear in linears):
        return ["what is added to a linear layer has another shape"]
    return ["a linear layer's result has other readers"]


def _fuse(exported: ExportedProgram, addition: fx.Node, linear: fx.Node, residual: fx.Node) -> None:
    graph = exported.graph
    rows, weight = linear.args[:2]
    bias = matching.argument(linear, 2, "bias") or matching.no_operand(exported, 1)
    with graph.inserting_before(addition):
        fused = call(graph, LINEAR_RESIDUAL, rows, weight, bias, residual, like=addition)
    matching.replace(exported, addition, fused)
    matching.remove_unused(exported, [addition])
