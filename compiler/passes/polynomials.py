"""Formulas of one value, written in whatever order, compared by their coefficients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from octavo.compiler.passes import matching
from octavo.compiler.passes.matching import operator_of

# Coefficients of x^i * t^j by (i, j).
Polynomial = dict[tuple[int, int], float]

_X: Polynomial = {(1, 0): 1.0}
_T: Polynomial = {(0, 1): 1.0}
_LARGEST_DEGREE = 3


class NotAPolynomialError(Exception):
    """The formula has another variable, or another operator."""


def polynomial(node: Any, x: fx.Node, t: fx.Node | None = None) -> Polynomial:
    """What `node` computes, as a polynomial of the values of `x` and `t`."""
    if isinstance(node, (int, float)):
        return {(0, 0): float(node)}
    if node is x:
        return _X
    if node is t:
        return _T
    rule = _RULES.get(operator_of(node))
    if rule is None or node.kwargs:
        raise NotAPolynomialError
    operands = [polynomial(argument, x, t) for argument in node.args]
    return rule(*operands)


def _sum(a: Polynomial, b: Polynomial) -> Polynomial:
    return {key: a.get(key, 0.0) + b.get(key, 0.0) for key in a.keys() | b.keys()}


def _difference(a: Polynomial, b: Polynomial) -> Polynomial:
    return _sum(a, {key: -value for key, value in b.items()})


def _product(a: Polynomial, b: Polynomial) -> Polynomial:
    result: Polynomial = {}
    for (i, j), left in a.items():
        for (k, m), right in b.items():
            if i + k > _LARGEST_DEGREE or j + m > 1:
                raise NotAPolynomialError
            result[i + k, j + m] = result.get((i + k, j + m), 0.0) + left * right
    return result


def _constant(value: Polynomial) -> float:
    if value.keys() != {(0, 0)}:
        raise NotAPolynomialError
    return value[0, 0]


def _quotient(a: Polynomial, b: Polynomial) -> Polynomial:
    divisor = _constant(b)
    return {key: value / divisor for key, value in a.items()}


def _power(a: Polynomial, b: Polynomial) -> Polynomial:
    exponent = _constant(b)
    if exponent not in (2.0, 3.0):
        raise NotAPolynomialError
    square = _product(a, a)
    return square if exponent == 2.0 else _product(square, a)


_RULES: Mapping[str, Callable[..., Polynomial]] = {
    "aten.add": _sum,
    "aten.div": _quotient,
    "aten.mul": _product,
    "aten.pow": _power,
    "aten.square": lambda a: _product(a, a),
    "aten.sub": _difference,
}


def is_close(a: Polynomial, b: Polynomial) -> bool:
    """Whether coefficients are the same, as people and float32 round them."""
    return all(
        math.isclose(a.get(key, 0.0), b.get(key, 0.0), rel_tol=1e-6) for key in a.keys() | b.keys()
    )


def formula_of(node: fx.Node, wanted: Polynomial, depth: int = 6) -> fx.Node | None:
    """The x of which `node` computes the polynomial `wanted`, some operators before it."""
    candidates = list(node.all_input_nodes)
    for _ in range(depth):
        for x in candidates:
            if _computes(node, wanted, x):
                return x
        candidates = [
            source
            for candidate in candidates
            if operator_of(candidate) in _RULES
            for source in candidate.all_input_nodes
        ]
    return None


def root_of(t: fx.Node, wanted: Polynomial, x: fx.Node, height: int = 4) -> fx.Node | None:
    """The node that computes `wanted` of x and t, and is all that `t` is used for."""
    node = matching.only_user(t)
    for _ in range(height):
        if node is None or _computes(node, wanted, x, t):
            return node
        node = matching.only_user(node)
    return None


def _computes(node: fx.Node, wanted: Polynomial, x: fx.Node, t: fx.Node | None = None) -> bool:
    try:
        return is_close(polynomial(node, x, t), wanted)
    except NotAPolynomialError:
        return False
