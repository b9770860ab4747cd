"""HF's batch axis of one goes: the graph works on [T, ...] tensors, as the batch is flattened.

Every value of shape [1, ...] that starts at an `unsqueeze(x, 0)` gets a twin without that axis, as
far as the rules below carry it. Where no rule fits, the axis is put back and nothing else changes.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from octavo.graphs.spec import PassRecord

_ATEN = torch.ops.aten

# Arguments and keyword arguments of a node's twin, None if there is none.
Call = tuple[tuple[Any, ...], dict[str, Any]]
Rule = Callable[["_Rewriter", fx.Node], Call | None]

_ELEMENTWISE = frozenset(
    {
        "abs",
        "add",
        "clamp",
        "clamp_max",
        "clamp_min",
        "cos",
        "div",
        "eq",
        "erf",
        "exp",
        "expm1",
        "ge",
        "gelu",
        "gt",
        "le",
        "log",
        "lt",
        "masked_fill",
        "maximum",
        "minimum",
        "mul",
        "ne",
        "neg",
        "pow",
        "reciprocal",
        "relu",
        "rsqrt",
        "rsub",
        "sigmoid",
        "silu",
        "sin",
        "softplus",
        "sqrt",
        "square",
        "sub",
        "tanh",
        "to",
        "type_as",
        "where",
        "_to_copy",
    }
)


class _Rewriter:
    def __init__(self, exported: ExportedProgram) -> None:
        self.exported = exported
        self.graph = exported.graph
        self.flat: dict[fx.Node, fx.Node] = {}
        self.unmatched: dict[str, int] = {}

    def run(self) -> int:
        nodes = [node for node in self.graph.nodes if node.op == "call_function"]
        for node in nodes:
            self._visit(node)
        for node, twin in self.flat.items():
            self._restore_where_needed(node, twin)
        for node in reversed(list(self.graph.nodes)):
            if node.op == "call_function" and not node.users:
                self.graph.erase_node(node)
        return len(self.flat)

    def _visit(self, node: fx.Node) -> None:
        name = _name(node)
        if name == "unsqueeze" and _axis(node.args[1], _rank(node)) == 0:
            self.flat[node] = cast(fx.Node, node.args[0])
            return
        if name == "select" and self._drops_the_axis(node):
            self._replace(node, self.flat[cast(fx.Node, node.args[0])])
            return
        if name == "getitem":
            source = self.flat.get(cast(fx.Node, node.args[0]))
            if source is not None:
                self.flat[node] = self._twin(node, (source, node.args[1]), {})
            return
        if not any(argument in self.flat for argument in node.all_input_nodes):
            return
        rule = _elementwise if name in _ELEMENTWISE else _RULES.get(name)
        call = rule(self, node) if rule is not None and _leads_with_one(node) else None
        if call is not None:
            self.flat[node] = self._twin(node, *call)
        else:
            self.unmatched[str(node.target)] = self.unmatched.get(str(node.target), 0) + 1

    def _drops_the_axis(self, node: fx.Node) -> bool:
        source = cast(fx.Node, node.args[0])
        return source in self.flat and _axis(node.args[1], _rank(source)) == 0

    def _twin(self, node: fx.Node, arguments: tuple[Any, ...], named: dict[str, Any]) -> fx.Node:
        with self.graph.inserting_before(node):
            twin: fx.Node = self.graph.call_function(cast(Any, node.target), arguments, named)
        twin.meta = copy(node.meta)
        twin.meta["val"] = _without_axis(node.meta["val"])
        return twin

    def operand(self, argument: Any, rank: int) -> Any:
        """`argument` for a twin whose original has `rank` axes; None if it must keep its first."""
        if not isinstance(argument, fx.Node) or not isinstance(argument.meta.get("val"), Tensor):
            return argument
        if argument in self.flat and _rank(argument) == rank:
            return self.flat[argument]
        if _rank(argument) < rank:
            return None if argument in self.flat else argument
        return None

    def source(self, node: fx.Node) -> fx.Node | None:
        return self.flat.get(cast(fx.Node, node.args[0]))

    def _restore_where_needed(self, node: fx.Node, twin: fx.Node) -> None:
        users = [user for user in node.users if user not in self.flat]
        if not users or _name(node) in ("chunk", "split", "split_with_sizes", "unsqueeze"):
            return
        with self.graph.inserting_after(node):
            restored = self.graph.call_function(_ATEN.unsqueeze.default, (twin, 0))
        restored.meta = copy(node.meta)
        self._replace(node, restored)

    def _replace(self, node: fx.Node, replacement: fx.Node) -> None:
        node.replace_all_uses_with(replacement, delete_user_cb=lambda user: user is not replacement)
        self.exported.graph_signature.replace_all_uses(node.name, replacement.name)


def flatten_batch(exported: ExportedProgram) -> tuple[ExportedProgram, PassRecord]:
    rewriter = _Rewriter(exported)
    matches = rewriter.run()
    exported.graph_module.recompile()
    skipped = tuple(
        f"{count} x {target} keeps the batch axis: no rule"
        for target, count in sorted(rewriter.unmatched.items())
    )
    return exported, PassRecord(name="flatten_batch", matches=matches, skipped=skipped)


def _name(node: fx.Node) -> str:
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target.overloadpacket.__name__) if target.namespace == "aten" else str(target)
    return getattr(target, "__name__", str(target))


def _rank(node: fx.Node) -> int:
    return cast(Tensor, node.meta["val"]).dim()


def _axis(dim: Any, rank: int) -> int:
    return int(dim) % rank


def _leads_with_one(node: fx.Node) -> bool:
    value = node.meta["val"]
    first = value[0] if isinstance(value, (list, tuple)) else value
    size = first.shape[0] if first.dim() else None
    return isinstance(size, int) and size == 1


def _without_axis(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(v.squeeze(0) for v in value)
    return value.squeeze(0)


def _elementwise(rewriter: _Rewriter, node: fx.Node) -> Call | None:
    rank = _rank(node)
    if any(a in rewriter.flat and _rank(a) != rank for a in node.all_input_nodes):
        return None
    arguments = tuple(rewriter.operand(a, rank) for a in node.args)
    given = [a for a in node.args if isinstance(a, fx.Node)]
    if sum(isinstance(a, fx.Node) for a in arguments) != len(given):
        return None
    return arguments, dict(node.kwargs)


def _first_operand(rewriter: _Rewriter, node: fx.Node) -> Call | None:
    """Only the first tensor has the axis, and nothing else counts axes from the front."""
    source = rewriter.source(node)
    return None if source is None else ((source, *node.args[1:]), dict(node.kwargs))


def _with_axis_at(position: int, default: int | None = None) -> Rule:
    """The argument at `position` names an axis, or several; none may be the batch's."""

    def rule(rewriter: _Rewriter, node: fx.Node) -> Call | None:
        source = rewriter.source(node)
        dims = node.args[position] if len(node.args) > position else default
        if source is None or dims is None:
            return None
        rank = _rank(cast(fx.Node, node.args[0]))
        several = dims if isinstance(dims, (list, tuple)) else [dims]
        moved = [_axis(dim, rank) - 1 for dim in several]
        if min(moved, default=-1) < 0:
            return None
        changed = list(node.args) + [default] * (position + 1 - len(node.args))
        changed[0] = source
        changed[position] = moved if isinstance(dims, (list, tuple)) else moved[0]
        return tuple(changed), dict(node.kwargs)

    return rule


def _unsqueeze(rewriter: _Rewriter, node: fx.Node) -> Call | None:
    source = rewriter.source(node)
    return None if source is None else ((source, _axis(node.args[1], _rank(node)) - 1), {})


def _transpose(rewriter: _Rewriter, node: fx.Node) -> Call | None:
    source = rewriter.source(node)
    axes = [_axis(dim, _rank(node)) - 1 for dim in node.args[1:3]]
    return None if source is None or min(axes) < 0 else ((source, *axes), {})


def _permute(rewriter: _Rewriter, node: fx.Node) -> Call | None:
    source = rewriter.source(node)
    order = [_axis(dim, _rank(node)) for dim in cast("list[int]", node.args[1])]
    if source is None or order[0] != 0:
        return None
    return (source, [axis - 1 for axis in order[1:]]), {}


def _view(rewriter: _Rewriter, node: fx.Node) -> Call | None:
    source = rewriter.source(node)
    sizes = cast("list[Any]", node.args[1])
    if source is None or len(sizes) < 2:
        return None
    return (source, list(sizes[1:])), {}


def _expand(rewriter: _Rewriter, node: fx.Node) -> Call | None:
    source = rewriter.source(node)
    sizes = cast("list[Any]", node.args[1])
    if source is None or len(sizes) != _rank(cast(fx.Node, node.args[0])):
        return None
    return (source, list(sizes[1:])), {}


def _concatenate(rewriter: _Rewriter, node: fx.Node) -> Call | None:
    tensors = [rewriter.flat.get(t) for t in cast("list[fx.Node]", node.args[0])]
    axis = _axis(node.args[1] if len(node.args) > 1 else 0, _rank(node)) - 1
    return None if None in tensors or axis < 0 else ((tensors, axis), {})


def _index(rewriter: _Rewriter, node: fx.Node) -> Call | None:
    source = rewriter.source(node)
    indices = cast("list[Any]", node.args[1])
    if source is None or indices[0] is not None or any(i in rewriter.flat for i in indices[1:]):
        return None
    return (source, list(indices[1:])), {}


def _embedding(rewriter: _Rewriter, node: fx.Node) -> Call | None:
    ids = rewriter.flat.get(cast(fx.Node, node.args[1]))
    return None if ids is None else ((node.args[0], ids, *node.args[2:]), dict(node.kwargs))


_RULES: dict[str, Rule] = {
    "cat": _concatenate,
    "chunk": _with_axis_at(2, 0),
    "concat": _concatenate,
    "cumsum": _with_axis_at(1),
    "embedding": _embedding,
    "expand": _expand,
    "index": _index,
    "layer_norm": _first_operand,
    "linear": _first_operand,
    "mean": _with_axis_at(1),
    "permute": _permute,
    "repeat_interleave": _with_axis_at(2),
    "reshape": _view,
    "rms_norm": _first_operand,
    "select": _with_axis_at(1),
    "slice": _with_axis_at(1, 0),
    "softmax": _with_axis_at(1),
    "split": _with_axis_at(2, 0),
    "split_with_sizes": _with_axis_at(2, 0),
    "stack": _concatenate,
    "sum": _with_axis_at(1),
    "topk": _with_axis_at(2, -1),
    "transpose": _transpose,
    "unsqueeze": _unsqueeze,
    "view": _view,
}
