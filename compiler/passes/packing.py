"""Columns of values as the rows of a matrix: as they lie, cut out, repeated or gathered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from octavo.compiler.passes.elements import TOKENS, Elements
from octavo.compiler.passes.parameters import add_parameter, call, parameter, parameter_name

_ATEN = torch.ops.aten


@dataclass(frozen=True)
class Columns:
    """Columns, by number, of a node that has `count` elements for every token."""

    node: fx.Node
    numbers: Tensor  # i64 [C]
    count: int

    @property
    def is_whole(self) -> bool:
        return self.numbers.tolist() == list(range(self.count))

    @property
    def is_permutation(self) -> bool:
        return sorted(self.numbers.tolist()) == list(range(self.count))


def columns_of(elements: Elements, numbers: Tensor) -> Columns | None:
    """The columns of one leaf that elements [T, ...] are; None if there is no such leaf."""
    leaf = elements.leaf_of(numbers)
    axis = None if leaf is None else _token_axis(leaf.node)
    if leaf is None or axis is None:
        return None
    by_token = leaf.numbers.movedim(axis, 0).reshape(TOKENS, -1)
    count, first = by_token.shape[1], int(leaf.numbers.min())
    places = torch.empty(leaf.numbers.numel(), dtype=torch.int64)
    places[by_token.flatten() - first] = torch.arange(TOKENS * count)
    columns = places[numbers.flatten(1) - first] - count * torch.arange(TOKENS)[:, None]
    if not bool((columns == columns[0]).all()):
        return None
    return Columns(leaf.node, columns[0], count)


def joined(parts: list[Columns]) -> Columns | None:
    """The columns of `parts` one after the other, if they are columns of one node."""
    first = parts[0]
    if any(part.node is not first.node for part in parts):
        return None
    return Columns(first.node, torch.cat([part.numbers for part in parts]), first.count)


class Packer:
    """Writes columns into the graph; equal ones are written once where that can be."""

    def __init__(self, exported: ExportedProgram) -> None:
        self._exported = exported
        self._shared: dict[tuple[fx.Node, tuple[int, ...]], fx.Node] = {}

    def shared(self, columns: Columns) -> fx.Node:
        """Columns that several layers read, written right behind their source."""
        key = columns.node, tuple(columns.numbers.tolist())
        if key not in self._shared:
            with self._exported.graph.inserting_before(columns.node.next):
                self._shared[key] = self.written(columns)
        return self._shared[key]

    def written(self, columns: Columns) -> fx.Node:
        """[T, C], at the graph's insertion point."""
        graph, node, numbers = self._exported.graph, columns.node, columns.numbers
        half = _half(numbers)
        if half is not None:
            part = self.written(Columns(node, half, columns.count))
            if numbers[0] == numbers[1]:
                return call(graph, _ATEN.repeat_interleave.self_int, part, 2, 1, like=node)
            return call(graph, _ATEN.cat.default, [part, part], 1, like=node)
        rows = self._rows(node, columns.count)
        if columns.is_whole:
            return rows
        start, size = int(numbers[0]), numbers.shape[0]
        if numbers.tolist() == list(range(start, start + size)):
            return call(graph, _ATEN.slice.Tensor, rows, 1, start, start + size, like=node)
        index = add_parameter(self._exported, f"{node.name}_columns", numbers)
        return call(graph, _ATEN.index_select.default, rows, 1, index, like=node)

    def reordered(self, columns: Columns) -> fx.Node | None:
        """The linear layer itself with its columns in another order; None if it is none."""
        exported, linear = self._exported, columns.node
        if linear.target is not _ATEN.linear.default or not columns.is_permutation:
            return None
        added = []
        for operand in linear.args[1:]:
            tensor = parameter(exported, operand) if isinstance(operand, fx.Node) else None
            if tensor is None:
                return None
            name = f"{parameter_name(exported, cast(fx.Node, operand))}.reordered"
            added.append(add_parameter(exported, name, tensor.detach()[columns.numbers]))
        node = call(exported.graph, linear.target, linear.args[0], *added, like=linear)
        return self._rows(node, columns.count)

    def _rows(self, node: fx.Node, count: int) -> fx.Node:
        graph, shape = self._exported.graph, node.meta["val"].shape
        axis = cast(int, _token_axis(node))
        if len(shape) == 2 and axis == 0 and shape[1] == count:
            return node
        if any(size != 1 for size in shape[:axis]):
            order = [axis, *(i for i in range(len(shape)) if i != axis)]
            node = call(graph, _ATEN.permute.default, node, order, like=node)
        return call(graph, _ATEN.reshape.default, node, [-1, count], like=node)


def _token_axis(node: fx.Node) -> int | None:
    """The only axis whose size depends on the step."""
    unknown = [
        axis for axis, size in enumerate(node.meta["val"].shape) if not isinstance(size, int)
    ]
    return unknown[0] if len(unknown) == 1 else None


def _half(numbers: Tensor) -> Tensor | None:
    """a of [a, a] or of [a0, a0, a1, a1, ...], for neighbouring columns a."""
    size = numbers.shape[0] // 2
    for first, second in ((numbers[:size], numbers[size:]), (numbers[::2], numbers[1::2])):
        if size > 1 and torch.equal(first, second) and bool((first.diff() == 1).all()):
            return first
    return None
