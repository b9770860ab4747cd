"""What shape a request's output must have, with vLLM's names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from octavo.graphs.errors import RequestError
from octavo.runtime.sampling import parameter_checks as checks

# Characters of a description, beyond which reading it would make other requests wait.
_MAX_LENGTH = 1 << 18


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """Exactly one shape; RequestError for none, several, or one that is none on its face.

    Whether a grammar can be followed is known to the engine: it refuses the request that has it.

    json         a JSON schema, as a mapping or as text; stored as text
    json_object  True: any JSON object
    regex        the whole output matches it (syntax of Rust's regex crate)
    choice       the output is one of these texts
    grammar      a context-free grammar in llguidance's dialect of Lark, whose rule is `start`
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [one.name for one in fields(self) if getattr(self, one.name) not in (None, False)]
        if len(given) != 1:
            names = ", ".join(one.name for one in fields(self))
            raise RequestError(
                f"structured_outputs has {' and '.join(given) or 'no shape'}: give exactly one of "
                f"{names}"
            )
        if self.json is not None:
            _set(self, "json", _schema_text(self.json))
        elif self.choice is not None:
            _set(self, "choice", _choices(self.choice))
        elif self.json_object is not None:
            checks.boolean("json_object of structured_outputs", self.json_object)
        for name in ("json", "regex", "grammar"):
            if (text := getattr(self, name)) is not None:
                _check_text(name, text)


def _set(params: StructuredOutputsParams, name: str, value: object) -> None:
    object.__setattr__(params, name, value)


def _schema_text(schema: object) -> str:
    """The schema as JSON, whichever way it was given."""
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(
            f"the JSON schema cannot be read ({error}): give a JSON object"
        ) from None
    if not isinstance(value, Mapping):
        raise RequestError(
            f"the JSON schema is of type {type(value).__name__}, it must be a JSON object"
        )
    return text


def _choices(values: object) -> tuple[str, ...]:
    choices = checks.texts("choice of structured_outputs", values)
    if not choices:
        raise RequestError("choice of structured_outputs is empty: give at least one text")
    _check_text("choice", "".join(choices))
    return choices


def _check_text(name: str, text: object) -> None:
    if not isinstance(text, str) or not text:
        raise RequestError(f"{name} of structured_outputs is {text!r}, it must be a text")
    if len(text) > _MAX_LENGTH:
        raise RequestError(
            f"{name} of structured_outputs has {len(text)} characters, it may have {_MAX_LENGTH}: "
            "shorten it"
        )
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(
            f"{name} of structured_outputs has a lone surrogate, which is no character: remove it"
        ) from None
