"""What form a completion must have, with vLLM's names; checked here, compiled in grammars.py."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from decimal import Decimal
from typing import Any

from octavo.graphs.errors import RequestError
from octavo.runtime.sampling import parameter_checks as checks

# Longer ones would keep every other request waiting while they are compiled.
MAX_LENGTH = 1 << 16
# llguidance follows rules and references by recursion: a longer chain could overflow its stack.
MAX_GRAMMAR_MARKS = 700
MAX_REFERRING_PARTS = 700
# Each multiplies the states of the automaton.
MAX_INTERSECTIONS = 4
# It counts remainders by states of an automaton.
MAX_MULTIPLE = 10_000


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """Exactly one of the fields is given; RequestError names what is wrong with it.

    Of plain values: `StructuredOutputsParams(**dataclasses.asdict(params))` equals `params`.

    json         a JSON schema, as a dict or as its text; stored as text
    regex        a regular expression (Rust's syntax) that the whole text must match
    choice       texts of which the completion is one; stored as a tuple
    grammar      a Lark grammar in llguidance's dialect
    json_object  True: any JSON object
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        if self.json_object is False:
            _set(self, "json_object", None)
        given = [name for name in _names() if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "nothing"
            raise RequestError(
                f"structured_outputs has {found}, it must have exactly one of "
                f"{', '.join(_names())}: give one"
            )
        if self.json is not None:
            _set(self, "json", _schema_text(self.json))
        if self.regex is not None:
            _check_text("regex", self.regex, MAX_LENGTH)
        if self.choice is not None:
            _set(self, "choice", _choices(self.choice))
        if self.grammar is not None:
            _check_grammar(self.grammar)
        if self.json_object is not None:
            checks.boolean("json_object", self.json_object)


def structured_outputs(value: object) -> StructuredOutputsParams:
    """The parameters, or a mapping of their fields as it comes from another process."""
    if isinstance(value, StructuredOutputsParams):
        return value
    if not isinstance(value, Mapping):
        raise RequestError(
            f"structured_outputs is {value!r}, it must be StructuredOutputsParams or a mapping"
        )
    if unknown := [key for key in value if key not in _names()]:
        raise RequestError(
            f"structured_outputs has the unknown key {unknown[0]!r}: give one of "
            f"{', '.join(_names())}"
        )
    return StructuredOutputsParams(**value)


def _names() -> list[str]:
    return [field.name for field in fields(StructuredOutputsParams)]


def _set(params: StructuredOutputsParams, name: str, value: object) -> None:
    object.__setattr__(params, name, value)


def _schema_text(schema: object) -> str:
    """The schema as compact JSON, whatever way it was written."""
    if isinstance(schema, str):
        _check_text("json", schema, MAX_LENGTH)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"json is no JSON text ({error}): give a JSON schema") from None
    if not isinstance(schema, Mapping | bool):
        raise RequestError(
            f"json is of type {type(schema).__name__}, a JSON schema is an object: give a dict or "
            "its text"
        )
    value = schema if isinstance(schema, bool) else dict(schema)
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(
            f"json can not be written as JSON ({error}): give plain values"
        ) from None
    _check_text("json", text, MAX_LENGTH)
    _check_parts(value)
    return text


def _check_parts(schema: object) -> None:
    """RequestError for a schema whose compilation nothing else would bound."""
    parts = list(_parts(schema))
    objects = [part for part in parts if isinstance(part, Mapping)]
    if len(parts) > MAX_REFERRING_PARTS and any("$ref" in part for part in objects):
        raise RequestError(
            f"json has $ref and {len(parts)} objects and arrays, with $ref at most "
            f"{MAX_REFERRING_PARTS} are taken: give a smaller schema"
        )
    multiples = [_digits(part["multipleOf"]) for part in objects if "multipleOf" in part]
    if max(sum(multiples), math.lcm(*multiples)) > MAX_MULTIPLE:
        raise RequestError(
            f"the values of multipleOf in json have a sum or a common multiple above "
            f"{MAX_MULTIPLE}: give smaller ones"
        )


def _parts(value: object) -> Iterator[object]:
    """Every object and array in a JSON value, itself included."""
    rest = [value]
    while rest:
        part = rest.pop()
        if isinstance(part, Mapping):
            yield part
            rest += part.values()
        elif isinstance(part, list | tuple):
            yield part
            rest += part


def _digits(value: object) -> int:
    """A number without its decimal point: 25 of 0.25; 1 of what is no number, refused later."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return 1
    number = Decimal(str(value)).normalize().as_tuple()
    assert isinstance(number.exponent, int)
    if number.exponent > len(str(MAX_MULTIPLE)):
        return MAX_MULTIPLE + 1
    digits = int("".join(map(str, number.digits)) + "0" * number.exponent)
    return max(1, digits)


def _check_grammar(grammar: object) -> None:
    _check_text("grammar", grammar, MAX_LENGTH)
    count = sum(str(grammar).count(mark) for mark in ":([{")
    if count > MAX_GRAMMAR_MARKS:
        raise RequestError(
            f"grammar has {count} colons and opening brackets, at most {MAX_GRAMMAR_MARKS} are "
            "taken: give a smaller one"
        )
    if "multipleOf" in str(grammar):
        raise RequestError("grammar has a schema with multipleOf: give that schema as json")
    if (count := str(grammar).count("&")) > MAX_INTERSECTIONS:
        raise RequestError(
            f"grammar has {count} times &, at most {MAX_INTERSECTIONS} are taken: intersect less"
        )


def _choices(values: object) -> tuple[str, ...]:
    choices = checks.texts("choice", values)
    if not choices:
        raise RequestError("choice is empty, no text could be generated: give at least one text")
    for choice in choices:
        _check_text("a value of choice", choice, MAX_LENGTH)
    if (length := sum(map(len, choices))) > MAX_LENGTH:
        raise RequestError(
            f"the texts of choice have {length} characters, at most {MAX_LENGTH} are taken: "
            "give fewer"
        )
    return choices


def _check_text(name: str, value: object, limit: int) -> None:
    if not isinstance(value, str):
        raise RequestError(f"{name} is of type {type(value).__name__}: give a text")
    if not value:
        raise RequestError(f"{name} is empty, no text could be generated: leave it out")
    if len(value) > limit:
        raise RequestError(
            f"{name} has {len(value)} characters, at most {limit} are taken: give a shorter one"
        )
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise RequestError(f"{name} has a lone surrogate, which is no character: remove it")
