"""What elements are made of: the graph, evaluated on numbers of elements instead of values.

However a model writes its rotary embedding (halves, pairs, complex tables cut in two, a part of the
head only), every element of the result is a sum of one or two terms "sign * value * factor". Views
and concatenations move terms about, sums and products combine them. So what a piece of the graph
computes is read off its result, and nothing depends on how it is spelt.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from octavo.compiler.passes.dependence import Dependence
from octavo.compiler.passes.matching import operator_of
from octavo.graphs.bindings import TOKEN_IDS

TOKENS = 3  # of the step that is evaluated: enough to see what mixes tokens
_MOST_TERMS = 4

_MOVES = frozenset(
    {
        "_unsafe_view",
        "cat",
        "chunk",
        "clone",
        "concat",
        "contiguous",
        "expand",
        "flatten",
        "mT",
        "narrow",
        "permute",
        "repeat",
        "repeat_interleave",
        "reshape",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "stack",
        "t",
        "transpose",
        "unbind",
        "unflatten",
        "unsqueeze",
        "view",
    }
)


@dataclass(frozen=True)
class Term:
    """A product for every element: `coefficient * value * factor`, all of the result's shape.

    Values depend on the tokens, factors on their positions only. Both are numbers of elements of
    leaves; 0 is the number one.
    """

    coefficient: Tensor  # f64
    value: Tensor  # i64
    factor: Tensor  # i64

    def map(self, function: Callable[[Tensor], Tensor]) -> Term:
        return Term(function(self.coefficient), function(self.value), function(self.factor))

    def scaled(self, by: float) -> Term:
        return Term(self.coefficient * by, self.value, self.factor)


Terms = tuple[Term, ...]  # their sum


@dataclass(frozen=True)
class Leaf:
    """A node whose elements are taken as they are, and their numbers in its shape."""

    node: fx.Node
    numbers: Tensor  # i64


class UnknownElementsError(Exception):
    """A size that the number of tokens does not tell."""


class Elements:
    """Evaluates the nodes of a program for a step of `TOKENS` tokens."""

    def __init__(
        self, exported: ExportedProgram, dependence: Dependence, opaque: Container[fx.Node]
    ) -> None:
        """`opaque` nodes are leaves."""
        self._dependence = dependence
        self._opaque = opaque
        self._terms: dict[fx.Node, Terms | tuple[Terms, ...]] = {}
        self._leaves: list[Leaf] = []
        self._next = 1
        self._symbol = _token_symbol(exported)

    def of(self, node: fx.Node) -> Terms:
        return cast(Terms, self._evaluated(node))

    def leaf(self, node: fx.Node) -> Leaf:
        """The node as a leaf, however it is computed."""
        shape = [self._concrete(size) for size in node.meta["val"].shape]
        size = torch.Size(shape).numel()
        numbers = torch.arange(self._next, self._next + size).reshape(shape)
        self._next += size
        self._leaves.append(Leaf(node, numbers))
        return self._leaves[-1]

    def numbers_of(self, node: fx.Node) -> Tensor:
        """The numbers of a node that is a leaf."""
        return next(leaf.numbers for leaf in self._leaves if leaf.node is node)

    def leaf_of(self, numbers: Tensor) -> Leaf | None:
        """The one leaf that all of these elements belong to."""
        low, high = int(numbers.min()), int(numbers.max())
        for leaf in self._leaves:
            first = int(leaf.numbers.flatten()[0]) if leaf.numbers.numel() else high + 1
            if first <= low and high < first + leaf.numbers.numel():
                return leaf
        return None

    def _evaluated(self, node: fx.Node) -> Terms | tuple[Terms, ...]:
        if node not in self._terms:
            terms = None if node in self._opaque else self._combined(node)
            self._terms[node] = self._leaf_terms(node) if terms is None else terms
        return self._terms[node]

    def _combined(self, node: fx.Node) -> Terms | tuple[Terms, ...] | None:
        namespace, _, name = operator_of(node).rpartition(".")
        if name == "getitem":
            source = cast(fx.Node, node.args[0])
            several = self._evaluated(source) if _is_move(source) else None
            return None if several is None else cast(Terms, several[cast(int, node.args[1])])
        if namespace != "aten":
            return None
        if name in _MOVES:
            return self._moved(node)
        if node in self._dependence.on_positions:
            return None  # tables of angles are taken as they are
        if name == "neg":
            return tuple(term.scaled(-1) for term in self.of(cast(fx.Node, node.args[0])))
        if name in ("add", "sub") and not node.kwargs:
            return self._sum(node, -1 if name == "sub" else 1)
        return self._product(node) if name == "mul" else None

    def _leaf_terms(self, node: fx.Node) -> Terms:
        numbers = self.leaf(node).numbers
        one, none = torch.ones(numbers.shape, dtype=torch.float64), torch.zeros_like(numbers)
        if node in self._dependence.on_positions:
            return (Term(one, none, numbers),)
        return (Term(one, numbers, none),)

    def _moved(self, node: fx.Node) -> Terms | tuple[Terms, ...]:
        """The operator itself moves the terms of its operands, one slot of each at a time."""
        tensors = [n for n in node.all_input_nodes if isinstance(n.meta["val"], Tensor)]
        terms = {n: self.of(n) for n in tensors}
        slots = max(len(t) for t in terms.values())

        def component(slot: int, name: str) -> Any:
            def given(operand: fx.Node) -> Any:
                if operand not in terms:
                    return self._concrete(operand.meta["val"])
                own = terms[operand]
                # Contiguous, as what is viewed in the graph need not be an expanded product here.
                some: Tensor = getattr(own[min(slot, len(own) - 1)], name).contiguous()
                return some if slot < len(own) else torch.zeros_like(some)

            arguments = fx.node.map_arg(node.args, given)
            named = fx.node.map_arg(node.kwargs, given)
            return cast(Any, node.target)(*arguments, **named)

        parts = [
            [component(slot, name) for name in ("coefficient", "value", "factor")]
            for slot in range(slots)
        ]
        if isinstance(node.meta["val"], Tensor):
            return tuple(Term(*part) for part in parts)
        results = range(len(node.meta["val"]))
        return tuple(tuple(Term(*(c[i] for c in part)) for part in parts) for i in results)

    def _sum(self, node: fx.Node, sign: int) -> Terms | None:
        first, second = node.args
        if not isinstance(first, fx.Node) or not isinstance(second, fx.Node):
            return None
        terms = (*self.of(first), *(term.scaled(sign) for term in self.of(second)))
        if len(terms) > _MOST_TERMS or not any(bool(term.factor.any()) for term in terms):
            return None  # a bias or a residual, no rotation
        shape = _broadcast(*(term.value for term in terms))
        return tuple(term.map(lambda x: x.expand(shape)) for term in terms)

    def _product(self, node: fx.Node) -> Terms | None:
        first, second = node.args
        for one, other in ((first, second), (second, first)):
            if isinstance(one, fx.Node) and isinstance(other, (int, float)):
                return tuple(term.scaled(other) for term in self.of(one))
            if isinstance(other, fx.Node) and other in self._dependence.on_positions:
                if one not in self._dependence.on_tokens:
                    return None
                return _times(self.of(cast(fx.Node, one)), self.of(other))
        return None

    def _concrete(self, size: Any) -> int:
        if isinstance(size, int):
            return size
        value = size.node.expr.subs(self._symbol, TOKENS)
        if not value.is_Integer:
            raise UnknownElementsError("its sizes depend on more than the number of tokens")
        return int(value)


def _times(values: Terms, factors: Terms) -> Terms | None:
    if len(factors) != 1 or any(bool(term.factor.any()) for term in values):
        return None
    (factor,) = factors
    shape = _broadcast(values[0].value, factor.factor)
    return tuple(
        Term(
            (term.coefficient * factor.coefficient).expand(shape),
            term.value.expand(shape),
            factor.factor.expand(shape),
        )
        for term in values
    )


def _broadcast(*tensors: Tensor) -> torch.Size:
    shape: torch.Size = cast(Any, torch).broadcast_shapes(*(tensor.shape for tensor in tensors))
    return shape


def _is_move(node: fx.Node) -> bool:
    namespace, _, name = operator_of(node).rpartition(".")
    return namespace == "aten" and name in _MOVES


def _token_symbol(exported: ExportedProgram) -> Any:
    placeholders = exported.graph.find_nodes(op="placeholder")
    node = next(node for node in placeholders if node.name == TOKEN_IDS.name)
    return node.meta["val"].shape[0].node.expr
