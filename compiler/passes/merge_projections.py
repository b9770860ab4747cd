"""Linear layers that read the same value become one: query, key and value; gate and up.

One wide matrix product reads its input once, and a step of few tokens starts fewer kernels. The
columns lie in the order query, key, value, and gate, up.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from octavo.compiler import memory
from octavo.compiler.passes.parameters import (
    add_parameter,
    call,
    parameter,
    parameter_name,
    remove_unused_parameters,
)
from octavo.graphs.spec import PassRecord

_ATEN = torch.ops.aten
_LINEAR = _ATEN.linear.default

_ACTIVATIONS = frozenset(
    {
        "aten.add.Tensor",
        "aten.clamp.default",
        "aten.clamp_max.default",
        "aten.clamp_min.default",
        "aten.div.Tensor",
        "aten.erf.default",
        "aten.exp.default",
        "aten.gelu.default",
        "aten.leaky_relu.default",
        "aten.mul.Tensor",
        "aten.neg.default",
        "aten.pow.Tensor_Scalar",
        "aten.relu.default",
        "aten.sigmoid.default",
        "aten.silu.default",
        "aten.square.default",
        "aten.tanh.default",
    }
)
_ATTENTION = ("query", "key", "value")


@dataclass
class _Merger:
    exported: ExportedProgram
    merged: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)

    def attention(self, node: fx.Node) -> None:
        sources = [_linears_behind(cast(fx.Node, argument)) for argument in node.args[:3]]
        if all(source == sources[0] and len(source) <= 1 for source in sources):
            return  # one layer gives all three
        for role, source in zip(_ATTENTION, sources, strict=True):
            if len(source) != 1:
                self.skipped[f"attention left alone: its {role} comes from {_count(source)}"] += 1
                return
        self._merge(list(dict.fromkeys(s[0] for s in sources)), "query, key, value")

    def gate(self, product: fx.Node) -> None:
        pair = _gate_and_up(product)
        if pair is not None:
            self._merge(list(pair), "gate, up")

    def _merge(self, linears: list[fx.Node], kind: str) -> None:
        reason = self._obstacle(linears)
        if reason is not None:
            self.skipped[f"{kind} left alone: {reason}"] += 1
            return
        order = list(self.exported.graph.nodes)
        first = min(linears, key=order.index)
        weight = self._joined(linears, 1)
        biased = any(_bias(linear) is not None for linear in linears)
        operands = (linears[0].args[0], weight, *([self._joined(linears, 2)] if biased else []))
        graph = self.exported.graph
        with graph.inserting_before(first):
            whole = call(graph, _LINEAR, *operands, like=first)
            axis, start = whole.meta["val"].dim() - 1, 0
            parts = []
            for linear in linears:
                end = start + linear.meta["val"].shape[-1]
                parts.append(call(graph, _ATEN.slice.Tensor, whole, axis, start, end, like=linear))
                start = end
        for linear, part in zip(linears, parts, strict=True):
            linear.replace_all_uses_with(part)
            graph.erase_node(linear)
        # At once, not at the end: the peak is then one layer's weights twice.
        remove_unused_parameters(self.exported)
        self.merged[kind] += 1

    def _obstacle(self, linears: list[fx.Node]) -> str | None:
        if any(linear.args[0] is not linears[0].args[0] for linear in linears):
            return "they read different values"
        if any(linear.target is not _LINEAR for linear in linears):
            return "they multiply by a transposed weight"
        weights = [parameter(self.exported, cast(fx.Node, n.args[1])) for n in linears]
        biases = [parameter(self.exported, b) for n in linears if (b := _bias(n)) is not None]
        given = [tensor for tensor in (*weights, *biases) if tensor is not None]
        if len(given) != len(weights) + len(biases):
            return "their weights are computed"
        if len({tensor.dtype for tensor in given}) != 1:
            return "their weights have different dtypes"
        return None

    def _joined(self, linears: list[fx.Node], position: int) -> fx.Node:
        """A parameter of the rows of all `linears`' weights (1) or biases (2)."""
        tensors, names = [], []
        for linear in linears:
            weight = cast(Tensor, parameter(self.exported, cast(fx.Node, linear.args[1])))
            node = linear.args[1] if position == 1 else _bias(linear)
            name = parameter_name(self.exported, cast(fx.Node, linear.args[1])) or linear.name
            given = None if node is None else parameter(self.exported, cast(fx.Node, node))
            tensors.append(weight.new_zeros(weight.shape[0]) if given is None else given.detach())
            names.append(name.removesuffix(".weight"))
        kind = "weight" if position == 1 else "bias"
        return add_parameter(
            self.exported, f"{_joined_name(names)}.{kind}", memory.concatenated(tensors)
        )


def merge_projections(exported: ExportedProgram) -> tuple[ExportedProgram, PassRecord]:
    merger = _Merger(exported)
    for node in list(exported.graph.nodes):
        if node.target is torch.ops.octavo.paged_attention.default:
            merger.attention(node)
        elif node.target is _ATEN.mul.Tensor:
            merger.gate(node)
    exported.graph_module.recompile()
    record = PassRecord(
        name="merge_projections",
        matches=merger.merged.total(),
        notes=tuple(f"{count} x {kind}" for kind, count in sorted(merger.merged.items())),
        skipped=tuple(f"{count} x {why}" for why, count in sorted(merger.skipped.items())),
    )
    return exported, record


def _linears_behind(node: fx.Node) -> list[fx.Node]:
    """The linear layers whose results `node` is computed from, without passing through one."""
    found: dict[fx.Node, None] = {}
    seen: set[fx.Node] = set()
    pending = [node]
    while pending:
        current = pending.pop()
        if current in seen or not _is_tensor(current):
            continue
        seen.add(current)
        if current.target in (_LINEAR, _ATEN.addmm.default):
            found[current] = None
        else:
            pending.extend(current.all_input_nodes)
    return list(found)


def _gate_and_up(product: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The linear layers of `activation(gate) * up`."""
    first, second = product.args[:2]
    if not isinstance(first, fx.Node) or not isinstance(second, fx.Node):
        return None
    for up, activated in ((first, second), (second, first)):
        if up.target is _LINEAR and activated.target is not _LINEAR:
            gate = _activated(activated)
            if gate not in (None, up) and gate.meta["val"].shape == up.meta["val"].shape:
                return gate, up
    return None


def _activated(node: fx.Node) -> fx.Node | None:
    """The linear layer that `node` is an elementwise function of, and of nothing else."""
    linears: set[fx.Node] = set()
    pending = [node]
    while pending:
        current = pending.pop()
        if current.target is _LINEAR:
            linears.add(current)
        elif str(current.target) in _ACTIVATIONS:
            pending.extend(current.all_input_nodes)
        else:
            return None
    return linears.pop() if len(linears) == 1 else None


def _bias(linear: fx.Node) -> fx.Node | None:
    return cast("fx.Node | None", linear.args[2]) if len(linear.args) > 2 else None


def _is_tensor(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, (Tensor, list, tuple))


def _count(linears: list[fx.Node]) -> str:
    return f"{len(linears)} linear layers" if linears else "no linear layer"


def _joined_name(names: list[str]) -> str:
    """`a.q_proj`, `a.k_proj` -> `a.q_proj_k_proj`."""
    parent = names[0].rpartition(".")[0]
    return ".".join(filter(None, (parent, "_".join(name.rpartition(".")[2] for name in names))))
