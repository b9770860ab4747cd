"""Checks of single request parameters: the value as its type, or a RequestError that names it."""

from __future__ import annotations

import math
from collections.abc import Iterable

from octavo.graphs.errors import RequestError


def number(name: str, value: object) -> float:
    """`value` as a float; it may still be infinite or NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} is {value!r}, it must be a number")
    try:
        return float(value)
    except OverflowError:
        raise RequestError(f"{name} is too large, it must be a finite number") from None


def finite_number(name: str, value: object) -> float:
    checked = number(name, value)
    if not math.isfinite(checked):
        raise RequestError(f"{name} is {checked}, it must be a finite number")
    return checked


def number_between(name: str, value: object, low: float, high: float, remedy: str) -> float:
    """A number in [low, high]; NaN lies nowhere."""
    checked = number(name, value)
    if not low <= checked <= high:
        raise RequestError(f"{name} is {checked}, it must lie in [{low:g}, {high:g}]: {remedy}")
    return checked


def integer(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} is {value!r}, it must be an integer")
    return value


def boolean(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise RequestError(f"{name} is {value!r}, it must be True or False")
    return value


def token_ids(name: str, values: object) -> tuple[int, ...]:
    """Distinct token ids in the order given; () for None."""
    if values is None:
        return ()
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise RequestError(f"{name} is {values!r}, it must be a sequence of token ids")
    checked = [token_id(f"a value of {name}", value) for value in values]
    return tuple(dict.fromkeys(checked))


def token_id(name: str, value: object) -> int:
    checked = integer(name, value)
    if checked < 0:
        raise RequestError(f"{name} is {checked}, token ids start at 0")
    return checked


def texts(name: str, values: object) -> tuple[str, ...]:
    """Distinct texts in the order given, none of them empty; one text for a str, () for None."""
    if values is None:
        return ()
    if isinstance(values, str):
        values = (values,)
    if isinstance(values, bytes) or not isinstance(values, Iterable):
        raise RequestError(f"{name} is {values!r}, it must be a text or a sequence of texts")
    checked = []
    for value in values:
        if not isinstance(value, str):
            raise RequestError(f"a value of {name} is {value!r}, it must be a text")
        if not value:
            raise RequestError(f"a value of {name} is empty: every text needs a character")
        checked.append(value)
    return tuple(dict.fromkeys(checked))
