"""The one torch library that Octavo's operators are registered in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from octavo.graphs.ops.schema import DOMAIN, OperatorSchema

_torch_library: Any = torch.library  # it has no annotations
_LIBRARY = _torch_library.Library(DOMAIN, "FRAGMENT")


def register(
    schema: OperatorSchema, implementation: Callable[..., Any], fake: Callable[..., Any]
) -> Any:
    """Defines `octavo::{schema.name}`: what eager mode runs, and its results' shapes for tracing.

    Returns the operator, as `torch.ops.octavo.{schema.name}.default`.
    """
    _LIBRARY.define(schema.torch_schema)
    _LIBRARY.impl(schema.name, implementation, "CompositeExplicitAutograd")
    _torch_library.register_fake(f"{DOMAIN}::{schema.name}", fake, lib=_LIBRARY)
    return getattr(getattr(torch.ops, DOMAIN), schema.name).default


def in_place_shapes(schema: OperatorSchema) -> Callable[..., Any]:
    """For `register_fake` of an operator that changes inputs: the reference's other results."""

    def shapes(*arguments: Any) -> Any:
        results = getattr(getattr(torch.ops, DOMAIN), schema.name)(*arguments)
        results = results if isinstance(results, tuple) else (results,)
        kept = [one for i, one in enumerate(results) if i not in schema.changed_inputs]
        return kept[0] if len(kept) == 1 else tuple(kept)

    return shapes
