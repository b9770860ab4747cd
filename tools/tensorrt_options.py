"""`--tensorrt`: `key=value` pairs with commas between them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from octavo.tools import console

_KEYS = ("builder_optimization_level", "workspace_mib", "weight_streaming", "timing_cache")

BuildOption = Annotated[
    str | None,
    typer.Option(
        "--tensorrt",
        help="Of the TensorRT backends: builder_optimization_level=0 to 5, workspace_mib=N, "
        "weight_streaming=true, timing_cache=FILE; commas between them.",
        show_default=False,
    ),
]


def tensorrt_to_build(given: str | None) -> dict[str, Any] | None:
    """What `BuildConfig.tensorrt` takes; ends with a usage error for a key that there is not."""
    if given is None:
        return None
    options: dict[str, Any] = {}
    for part in given.split(","):
        key, separator, value = part.partition("=")
        if not separator:
            raise console.usage_error(f"--tensorrt: {part!r} is no key=value (got {given!r})")
        if key not in _KEYS:
            raise console.usage_error(
                f"--tensorrt has no key {key!r}: choose from {', '.join(_KEYS)}"
            )
        if key in options:
            raise console.usage_error(f"--tensorrt names {key} twice (got {given!r})")
        options[key] = value
    return options
