"""RMS and layer norms, spelled out or not, become `octavo.norm`, with the addition before them.

An addition whose operand is a linear layer's only use is left to the layer, which adds it for less.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from octavo.compiler.passes import matching
from octavo.compiler.passes.fuse_residuals import adds_to_a_linear
from octavo.compiler.passes.matching import operator_of
from octavo.compiler.passes.parameters import (
    add_parameter,
    call,
    parameter,
    parameter_name,
    remove_unused_parameters,
)
from octavo.graphs.ops.norm_torch import NORM_OPERATOR
from octavo.graphs.spec import PassRecord


@dataclass(frozen=True)
class Norm:
    last: fx.Node  # what the fused norm stands for
    x: fx.Node  # f32 [..., K]
    weight: fx.Node | None  # f32 [K]
    bias: fx.Node | None
    epsilon: float
    centered: bool


class UnmatchedNormError(Exception):
    """Why what looks like a norm is none that the operator computes."""


def fuse_norms(exported: ExportedProgram) -> tuple[ExportedProgram, PassRecord]:
    skipped: Counter[str] = Counter()
    matches = with_residual = 0
    for node in list(exported.graph.nodes):
        try:
            norm = match_norm(exported, node)
        except UnmatchedNormError as reason:
            skipped[str(reason)] += 1
            continue
        if norm is not None:
            with_residual += _fuse(exported, norm)
            matches += 1
    remove_unused_parameters(exported)
    exported.graph_module.recompile()
    notes = (f"{with_residual} with the residual's addition",) if with_residual else ()
    reasons = tuple(f"{count} x {reason}" for reason, count in sorted(skipped.items()))
    return exported, PassRecord(name="fuse_norms", matches=matches, notes=notes, skipped=reasons)


def match_norm(exported: ExportedProgram, node: fx.Node) -> Norm | None:
    """The norm that ends at `node`, or None; UnmatchedNormError for one of another kind."""
    name = operator_of(node)
    if name in ("aten.layer_norm", "aten.rms_norm"):
        return _whole_norm(exported, node, centered=name == "aten.layer_norm")
    root = _root_of_mean_square(node)
    return None if root is None else _spelled_out_norm(exported, node, *root)


def _whole_norm(exported: ExportedProgram, node: fx.Node, *, centered: bool) -> Norm:
    x, shape = cast(fx.Node, node.args[0]), cast("list[int]", node.args[1])
    weight = matching.argument(node, 2, "weight")
    bias = matching.argument(node, 3, "bias") if centered else None
    epsilon = matching.argument(node, 4 if centered else 3, "eps", 1e-5 if centered else None)
    if epsilon is None:
        epsilon = torch.finfo(torch.float32).eps
    _check_rows(x)
    if len(shape) != 1:
        raise UnmatchedNormError(f"a norm over {len(shape)} axes")
    for operand in (weight, bias):
        if operand is not None and not matching.is_vector(operand, shape[0]):
            raise UnmatchedNormError("a norm whose weight is no float32 vector")
    return Norm(node, x, weight, bias, float(epsilon), centered)


def _check_rows(x: fx.Node) -> None:
    if not matching.is_float(x):
        raise UnmatchedNormError("a norm of values other than float32 rows")


def _root_of_mean_square(node: fx.Node) -> tuple[fx.Node, float] | None:
    """(x, epsilon) if the node is 1 / sqrt(mean(x^2) + epsilon), over the last axis."""
    name = operator_of(node)
    if name == "aten.rsqrt" or (name == "aten.pow" and node.args[1] == -0.5):
        raised = node.args[0]
    elif name == "aten.reciprocal" and operator_of(node.args[0]) == "aten.sqrt":
        raised = cast(fx.Node, node.args[0]).args[0]
    else:
        return None
    for mean, epsilon in _both_orders(matching.summands(raised)):
        if isinstance(epsilon, (int, float)):
            x = matching.square_base(_mean_base(mean))
            return None if x is None else (x, float(epsilon))
    return None


def _mean_base(node: Any) -> fx.Node | None:
    """x of mean(x, -1, keepdim=True)"""
    if operator_of(node) != "aten.mean" or len(node.args) < 2:
        return None
    x, axes = cast(fx.Node, node.args[0]), node.args[1]
    value = matching.tensor_of(x)
    kept = matching.argument(node, 2, "keepdim", False)
    if value is None or not kept or [axis % value.dim() for axis in axes] != [value.dim() - 1]:
        return None
    return x


def _both_orders(pair: tuple[Any, Any] | None) -> list[tuple[Any, Any]]:
    return [] if pair is None else [pair, (pair[1], pair[0])]


def _spelled_out_norm(
    exported: ExportedProgram, root: fx.Node, shifted: fx.Node, epsilon: float
) -> Norm:
    _check_rows(shifted)
    x = _uncentered(shifted)
    scaled = matching.only_user(root)
    values = [value for value, other in _both_orders(matching.factors(scaled)) if other is root]
    if scaled is None or not any(_is_same(value, shifted) for value in values):
        raise UnmatchedNormError("an inverse root of a mean square that scales something else")
    last, weight = _weighted(exported, scaled)
    last, bias = _biased(exported, last)
    return Norm(last, shifted if x is None else x, weight, bias, epsilon, x is not None)


def _uncentered(node: fx.Node) -> fx.Node | None:
    """x of x - mean(x, -1, keepdim=True)"""
    if operator_of(node) != "aten.sub" or node.kwargs:
        return None
    x, mean = node.args
    return cast(fx.Node, x) if _mean_base(mean) is x else None


def _is_same(value: object, wanted: fx.Node) -> bool:
    """The same node, or the same difference computed twice."""
    if value is wanted:
        return True
    same = isinstance(value, fx.Node) and operator_of(value) == operator_of(wanted) == "aten.sub"
    return same and cast(fx.Node, value).args == wanted.args


def _weighted(exported: ExportedProgram, scaled: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """The multiplication by a constant vector that is the scaled rows' only use, if it is."""
    user = matching.only_user(scaled)
    for value, weight in _both_orders(matching.factors(user)):
        if value is scaled and isinstance(weight, fx.Node):
            folded = _constant_vector(exported, weight, _depth(scaled))
            if folded is not None:
                return cast(fx.Node, user), folded
    return scaled, None


def _biased(exported: ExportedProgram, last: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    user = matching.only_user(last)
    for value, bias in _both_orders(matching.summands(user)):
        if value is last and isinstance(bias, fx.Node):
            folded = _constant_vector(exported, bias, _depth(last))
            if folded is not None:
                return cast(fx.Node, user), folded
    return last, None


def _depth(node: fx.Node) -> int:
    return int(cast(Tensor, matching.tensor_of(node)).shape[-1])


def _constant_vector(exported: ExportedProgram, node: fx.Node, size: int) -> fx.Node | None:
    """A parameter [size]; if it is computed from one, as 1 + weight, a new one is made of it."""
    if not matching.is_vector(node, size):
        return None
    if parameter(exported, node) is not None:
        return node
    sources = node.all_input_nodes
    tensor = parameter(exported, sources[0]) if len(sources) == 1 else None
    operator = operator_of(node).removeprefix("aten.")
    if tensor is None or not operator:
        return None
    with torch.no_grad():
        arguments = fx.node.map_arg((node.args, node.kwargs), lambda _: tensor)
        value = cast(Any, node.target)(*arguments[0], **arguments[1])
    name = f"{parameter_name(exported, sources[0])}.{operator}"
    return add_parameter(exported, name, value, sources[0])


def _fuse(exported: ExportedProgram, norm: Norm) -> bool:
    """Whether an addition went into the norm."""
    graph = exported.graph
    nothing = matching.no_operand(exported, 1)
    no_rows = matching.no_operand(exported, 2)
    addends = _foldable_addends(norm.x)
    # The sum has other readers, so that it must be there when the addition was.
    with graph.inserting_before(norm.last if addends is None else norm.x):
        rows, residual = addends or (matching.as_rows(graph, norm.x), no_rows)
        fused = call(
            graph,
            NORM_OPERATOR,
            rows,
            residual,
            norm.weight or nothing,
            norm.bias or nothing,
            norm.epsilon,
            int(norm.centered),
            like=norm.last,
        )
        output = matching.shaped_like(graph, matching.result(graph, fused, 0), norm.last)
        matching.replace(exported, norm.last, output)
        matching.remove_unused(exported, [norm.last])
        if addends is not None and norm.x.users:
            matching.replace(exported, norm.x, matching.result(graph, fused, 1))
            matching.remove_unused(exported, [norm.x])
    return addends is not None


def _foldable_addends(x: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    addends = matching.summands(x)
    if addends is None or adds_to_a_linear(x) is not None:
        return None
    whole = all(matching.is_rows(addend) and matching.same_shape(addend, x) for addend in addends)
    return addends if whole else None
