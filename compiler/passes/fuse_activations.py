"""Activations, spelled out or not, become `octavo.activate`, with the product that they gate."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, fx
from torch.export import ExportedProgram

from octavo.compiler.passes import matching, polynomials
from octavo.compiler.passes.matching import operator_of
from octavo.compiler.passes.parameters import call
from octavo.graphs.ops.activation import Function
from octavo.graphs.ops.activation_torch import ACTIVATE_OPERATOR
from octavo.graphs.spec import PassRecord

_HALF_OF_ONE_MORE: polynomials.Polynomial = {(1, 0): 0.5, (1, 1): 0.5}  # x / 2 * (1 + t)
_ROOT = math.sqrt(2 / math.pi)
# By the function that makes t: its argument, and the activation.
_GELUS: dict[str, tuple[polynomials.Polynomial, Function]] = {
    "aten.erf": ({(1, 0): math.sqrt(0.5)}, Function.GELU),
    "aten.tanh": ({(1, 0): _ROOT, (3, 0): _ROOT * 0.044715}, Function.GELU_TANH),
}


@dataclass(frozen=True)
class _Activation:
    function: Function
    last: fx.Node  # what is the function of x
    x: fx.Node  # f32 [..., K]


def fuse_activations(exported: ExportedProgram) -> tuple[ExportedProgram, PassRecord]:
    kinds: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    for node in list(exported.graph.nodes):
        activation = _match(node)
        if activation is None:
            if operator_of(node) == "aten.sigmoid":
                skipped["a sigmoid that is no SiLU of its argument"] += 1
            continue
        if not matching.is_float(activation.x):
            skipped["an activation of values other than float32 rows"] += 1
            continue
        product, reason = _gated_product(activation)
        _fuse(exported, activation, product)
        kinds["plain" if product is None else "gated"] += 1
        if reason:
            skipped[f"a gate apart from its product: {reason}"] += 1
    exported.graph_module.recompile()
    return exported, PassRecord(
        name="fuse_activations",
        matches=kinds.total(),
        notes=tuple(f"{count} x {kind}" for kind, count in sorted(kinds.items())),
        skipped=tuple(f"{count} x {reason}" for reason, count in sorted(skipped.items())),
    )


def _match(node: fx.Node) -> _Activation | None:
    name = operator_of(node)
    if name == "aten.silu":
        return _Activation(Function.SILU, node, cast(fx.Node, node.args[0]))
    if name == "aten.sigmoid":
        return _spelled_out_silu(node)
    if name == "aten.gelu":
        tanh = matching.argument(node, 1, "approximate", "none") == "tanh"
        function = Function.GELU_TANH if tanh else Function.GELU
        return _Activation(function, node, cast(fx.Node, node.args[0]))
    if name == "aten.relu":
        return _relu(node)
    if name in _GELUS:
        return _spelled_out_gelu(node, *_GELUS[name])
    return None


def _spelled_out_silu(sigmoid: fx.Node) -> _Activation | None:
    x, user = cast(fx.Node, sigmoid.args[0]), matching.only_user(sigmoid)
    if user is None or set(matching.factors(user) or ()) != {x, sigmoid}:
        return None
    return _Activation(Function.SILU, user, x)


def _relu(node: fx.Node) -> _Activation:
    x, user = cast(fx.Node, node.args[0]), matching.only_user(node)
    if user is not None and matching.square_base(user) is node:
        return _Activation(Function.RELU_SQUARED, user, x)
    return _Activation(Function.RELU, node, x)


def _spelled_out_gelu(
    t: fx.Node, argument: polynomials.Polynomial, function: Function
) -> _Activation | None:
    x = polynomials.formula_of(cast(fx.Node, t.args[0]), argument)
    last = None if x is None else polynomials.root_of(t, _HALF_OF_ONE_MORE, x)
    return None if x is None or last is None else _Activation(function, last, x)


def _gated_product(activation: _Activation) -> tuple[fx.Node | None, str | None]:
    """The product of the activation and the other half of its tensor, or why there is none."""
    product = matching.only_user(activation.last)
    others = [f for f in matching.factors(product) or () if f is not activation.last]
    if not others or not matching.same_shape(others[0], activation.last):
        return None, None
    gate, factor = _half(activation.x), _half(others[0])
    if gate is None or factor is None or gate[0] is not factor[0]:
        return None, "it and its factor are separate tensors"
    if (gate[1], factor[1]) != (0, 1):
        return None, "its factor lies before it"
    return product, None


def _half(node: Any) -> tuple[fx.Node, int] | None:
    """(y, 0) for the first half of y [..., 2 K] along its last axis, (y, 1) for the second."""
    if operator_of(node) == "aten.slice":
        y, *bounds = node.args
        index = _sliced_half(cast(fx.Node, y), *bounds)
    elif operator_of(node) == "getitem" and operator_of(node.args[0]) in _SPLITS:
        y, index = node.args[0].args[0], node.args[1]
        if not _splits_in_half(node.args[0]):
            return None
    else:
        return None
    return None if index is None else (cast(fx.Node, y), index)


_SPLITS = ("aten.chunk", "aten.split", "aten.split_with_sizes")


def _splits_in_half(split: fx.Node) -> bool:
    parts = split.meta["val"]
    axis = matching.argument(split, 2, "dim", 0) % parts[0].dim()
    return len(parts) == 2 and axis == parts[0].dim() - 1 and parts[0].shape == parts[1].shape


def _sliced_half(
    y: fx.Node, axis: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> int | None:
    value = cast(Tensor, matching.tensor_of(y))
    depth = value.shape[-1]
    if not isinstance(depth, int) or depth % 2 or axis % value.dim() != value.dim() - 1:
        return None
    if step != 1 or not all(bound is None or isinstance(bound, int) for bound in (start, end)):
        return None
    bounds = (start or 0, depth if end is None else min(end, depth))
    halves = [(0, depth // 2), (depth // 2, depth)]
    return halves.index(bounds) if bounds in halves else None


def _fuse(exported: ExportedProgram, activation: _Activation, product: fx.Node | None) -> None:
    graph, last = exported.graph, product or activation.last
    half = _half(activation.x)
    x = activation.x if product is None or half is None else half[0]
    function, gated = int(activation.function), int(product is not None)
    with graph.inserting_before(last):
        rows = matching.as_rows(graph, x)
        fused = call(graph, ACTIVATE_OPERATOR, rows, function, gated, like=last)
        output = matching.shaped_like(graph, fused, last)
    matching.replace(exported, last, output)
    matching.remove_unused(exported, [last])
