"""`--speculative`: a drafter's name, or `key=value` pairs with commas between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.tools import console
from octavo.tools.options import ENGINE

if TYPE_CHECKING:
    from octavo.runtime.speculation.options import Speculative

OFF = "off"
_BUILD_KEYS = (
    "method",
    "model",
    "num_speculative_tokens",
    "prompt_lookup_min",
    "prompt_lookup_max",
    "quantization",
)
_WORDS = {"true": True, "false": False}

BuildOption = Annotated[
    list[str] | None,
    typer.Option(
        "--speculative",
        help="A drafter: method=eagle3,model=FOLDER,num_speculative_tokens=4; repeat it for more.",
    ),
]
ServeOption = Annotated[
    str | None,
    typer.Option(
        "--speculative",
        help="off, ngram, a drafter of the engine, or method=ngram,num_speculative_tokens=8.  "
        "[default: the drafters that the engine was built with]",
        rich_help_panel=ENGINE,
    ),
]


def drafters_to_build(given: list[str] | None) -> list[dict[str, Any]]:
    """What `BuildConfig.speculative` takes; ends with a usage error for an unknown key."""
    drafters = []
    for text in given or ():
        options = _pairs(text)
        for key in options:
            if key not in _BUILD_KEYS:
                raise console.usage_error(
                    f"--speculative has no key {key!r}: choose from {', '.join(_BUILD_KEYS)}"
                )
        if "method" not in options:
            raise console.usage_error(f"--speculative {text!r} names no method: add method=NAME")
        drafters.append(options)
    return drafters


def drafters_to_use(given: str | None) -> Speculative:
    """What `LLM(speculative=...)` takes."""
    if given is None:
        return None
    if given == OFF:
        return False
    return _pairs(given)


def _pairs(text: str) -> dict[str, Any]:
    """A first part without `=` is the method."""
    options: dict[str, Any] = {}
    for index, part in enumerate(text.split(",")):
        key, separator, value = part.partition("=")
        if not separator and index == 0:
            key, value = "method", part
        elif not separator:
            raise console.usage_error(f"--speculative: {part!r} is no key=value (got {text!r})")
        if key in options:
            raise console.usage_error(f"--speculative names {key} twice (got {text!r})")
        options[key] = int(value) if value.isdecimal() else _WORDS.get(value, value)
    return options
