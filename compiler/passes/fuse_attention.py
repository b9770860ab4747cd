"""Paged attention takes packed projections: QK norm and rotary embedding happen on its way in.

Every layer becomes `octavo.fused_paged_attention`. What cannot be folded in stays before it, and
what does not lie packed is concatenated: one form of attention serves float and int8 caches.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import fx
from torch.export import ExportedProgram

from octavo.compiler.passes import matching
from octavo.compiler.passes.dependence import Dependence
from octavo.compiler.passes.elements import Elements, UnknownElementsError
from octavo.compiler.passes.head_norms import HeadNorm, head_norms
from octavo.compiler.passes.packing import Columns, Packer, columns_of, joined
from octavo.compiler.passes.parameters import call, remove_unused_parameters
from octavo.compiler.passes.rotary import Heads, NoRotaryError, read
from octavo.graphs.ops import paged_attention
from octavo.graphs.ops.fused_paged_attention_torch import OPERATOR
from octavo.graphs.ops.paged_attention_torch import OPERATOR as PAGED_ATTENTION
from octavo.graphs.spec import PassRecord

_ATEN = torch.ops.aten
_INPUTS = len(paged_attention.SCHEMA.inputs)
_CACHE = 3  # place of the first operand after query, key and value


@dataclass(frozen=True)
class _Part:
    """Queries, keys or values: where they come from, and what the fused layer does to them."""

    columns: Columns
    heads: Heads
    norm: HeadNorm | None = None


@dataclass
class _Fuser:
    exported: ExportedProgram
    dependence: Dependence
    norms: dict[fx.Node, HeadNorm]
    packer: Packer
    hits: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)

    def fuse(self, node: fx.Node) -> None:
        elements = Elements(self.exported, self.dependence, self.norms)
        query, key, value = (cast(fx.Node, argument) for argument in node.args[:_CACHE])
        turned, angles = self._turned(elements, query, key)
        parts = [*self._normed(elements, turned), self._value(elements, value)]
        graph = self.exported.graph
        with graph.inserting_before(node):
            operands = [self._packed([part.columns for part in parts]), *angles]
            operands += [self._weight(part.norm) for part in parts[:2]]
            rest = [*node.args[_CACHE:_INPUTS], *_attributes(node, parts)]
            fused = call(graph, OPERATOR, *operands, *rest, like=node)
            results = [matching.result(graph, fused, index) for index in (0, 1)]
        self._replace_results(node, *results)

    def _turned(
        self, elements: Elements, query: fx.Node, key: fx.Node
    ) -> tuple[list[_Part], list[fx.Node]]:
        """Queries and keys before rotary embedding, if that can be folded in; cosines and sines."""
        try:
            parts = [self._read(elements, node) for node in (query, key)]
            angles = self._angles(elements, *parts)
        except (NoRotaryError, UnknownElementsError) as reason:
            self.skipped[f"rotary left alone: {reason}"] += 1
            parts = [_opaque(elements, node) for node in (query, key)]
            angles = None
        if angles is None:
            return parts, [matching.no_operand(self.exported, 2)] * 2
        rotation = parts[0].heads.rotation
        interleaved = rotation is not None and rotation.interleaved
        self.hits["interleaved rotary" if interleaved else "rotary"] += 1
        return parts, angles

    def _read(self, elements: Elements, node: fx.Node) -> _Part:
        heads = read(elements.of(node))
        columns = columns_of(elements, heads.numbers)
        source = node if columns is None else columns.node
        if heads.rotation is None and self.dependence.meets_positions(source):
            raise NoRotaryError("other operators follow it")
        if columns is None and heads.rotation is not None:
            raise NoRotaryError("what it turns comes from several values")
        return _opaque(elements, node) if columns is None else _Part(columns, heads)

    def _angles(self, elements: Elements, query: _Part, key: _Part) -> list[fx.Node] | None:
        if key.heads.scale != 1:
            raise NoRotaryError("keys are scaled")  # the cache would hold other keys
        first, second = query.heads.rotation, key.heads.rotation
        if first is None and second is None:
            return None
        if first is None or second is None or not first.same(second):
            raise NoRotaryError("queries and keys are turned by different angles")
        columns = [columns_of(elements, numbers) for numbers in (first.cos, first.sin)]
        if None in columns:
            raise NoRotaryError("its angles come from several values")
        return [self.packer.shared(cast(Columns, table)) for table in columns]

    def _normed(self, elements: Elements, parts: list[_Part]) -> list[_Part]:
        """Queries and keys before their norms, if both have one that can be folded in."""
        norms = [self.norms.get(part.columns.node) for part in parts]
        if None in norms:
            return parts
        before = [
            _before_norm(elements, part, cast(HeadNorm, norm))
            for part, norm in zip(parts, norms, strict=True)
        ]
        epsilons = {norm.epsilon for norm in norms if norm is not None}
        if None in before or len(epsilons) != 1:
            self.skipped["QK norm left alone: it is not one of the elements of a head"] += 1
            return parts
        self.hits["QK norm"] += 1
        return cast("list[_Part]", before)

    def _value(self, elements: Elements, node: fx.Node) -> _Part:
        try:
            heads = read(elements.of(node))
        except (NoRotaryError, UnknownElementsError):
            return _opaque(elements, node)
        columns = columns_of(elements, heads.numbers)
        if columns is None or heads.rotation is not None or heads.scale != 1:
            return _opaque(elements, node)
        return _Part(columns, heads)

    def _packed(self, parts: list[Columns]) -> fx.Node:
        """[T, H * Dk + Hkv * Dk + Hkv * Dv]"""
        whole = joined(parts)
        if whole is not None and whole.is_whole:
            self.hits["projection packed as it is"] += 1
            return self.packer.written(whole)
        reordered = None if whole is None else self.packer.reordered(whole)
        if reordered is not None:
            self.hits["projection with reordered weights"] += 1
            return reordered
        self.hits["queries, keys and values concatenated"] += 1
        graph = self.exported.graph
        written = [self.packer.written(part) for part in parts]
        return call(graph, _ATEN.cat.default, written, 1, like=parts[0].node)

    def _weight(self, norm: HeadNorm | None) -> fx.Node:
        return matching.no_operand(self.exported, 1) if norm is None else norm.weight

    def _replace_results(self, node: fx.Node, attention: fx.Node, cache: fx.Node) -> None:
        """`attention` is [T, H * Dv], what it stands for [T, H, Dv]."""
        graph = self.exported.graph
        for item in list(node.users):
            if item.args[1] == 1:
                matching.replace(self.exported, item, cache)
                continue
            for user in list(item.users):
                views = matching.operator_of(user) in ("aten.view", "aten.reshape")
                if views and matching.same_shape(user, attention):
                    matching.replace(self.exported, user, attention)
                    graph.erase_node(user)
            if item.users:
                sizes = [-1, *item.meta["val"].shape[1:]]
                with graph.inserting_before(node):
                    by_head = call(graph, _ATEN.reshape.default, attention, sizes, like=node)
                matching.replace(self.exported, item, by_head)
        matching.remove_unused(self.exported, [*node.users, node])


def fuse_attention(exported: ExportedProgram) -> tuple[ExportedProgram, PassRecord]:
    dependence = Dependence(exported)
    dependence.merge_repeated_angles(exported)
    fuser = _Fuser(exported, dependence, head_norms(exported), Packer(exported))
    layers = [node for node in exported.graph.nodes if node.target is PAGED_ATTENTION]
    for node in layers:
        fuser.fuse(node)
    remove_unused_parameters(exported)
    exported.graph_module.recompile()
    record = PassRecord(
        name="fuse_attention",
        matches=len(layers),
        notes=tuple(f"{count} x {kind}" for kind, count in sorted(fuser.hits.items())),
        skipped=tuple(f"{count} x {why}" for why, count in sorted(fuser.skipped.items())),
    )
    return exported, record


def _opaque(elements: Elements, node: fx.Node) -> _Part:
    """The value as it is, [T, H, D], whatever it is computed from."""
    numbers = elements.leaf(node).numbers
    size = numbers[0].numel()
    return _Part(Columns(node, torch.arange(size), size), Heads(numbers))


def _before_norm(elements: Elements, part: _Part, norm: HeadNorm) -> _Part | None:
    """What the norm reads, if it norms the elements of every head in their order."""
    numbers, terms = part.heads.numbers, elements.of(norm.x)
    head_size = numbers.shape[2]
    places = numbers - int(elements.numbers_of(norm.last).min())
    in_order = places[..., :1] + torch.arange(head_size)
    whole_rows = bool((places[..., 0] % head_size == 0).all()) and torch.equal(places, in_order)
    if not whole_rows or norm.weight.meta["val"].shape[0] != head_size or len(terms) != 1:
        return None
    (term,) = terms
    if bool((term.coefficient != 1).any()) or bool(term.factor.any()):
        return None
    before = term.value.flatten()[places]
    columns = columns_of(elements, before)
    heads = replace(part.heads, numbers=before)
    return None if columns is None else _Part(columns, heads, norm)


def _attributes(node: fx.Node, parts: list[_Part]) -> list[Any]:
    """What the fused operator's schema lists, from num_heads on."""
    query, key = (part.heads for part in parts[:2])
    scale, *others = node.args[_INPUTS:]
    rotation, norm = query.rotation, parts[0].norm
    return [
        query.numbers.shape[1],
        key.numbers.shape[1],
        query.numbers.shape[2],
        int(rotation is not None and rotation.interleaved),
        0.0 if norm is None else norm.epsilon,
        cast(float, scale) * query.scale,
        *others,
    ]
