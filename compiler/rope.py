"""Rotary embeddings whose frequencies depend on the running batch are frozen at build time.

HF's `longrope` and `dynamic` types look at the longest position of a forward pass, so a token's key
would depend on what else is in the step. The engine's `max_model_len` decides instead.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from octavo.graphs.errors import UnsupportedModelError


def freeze(model: nn.Module, max_model_len: int) -> tuple[str, ...]:
    """Freezes every batch-dependent rotary module in place; returns one sentence for each.

    Raises UnsupportedModelError for dynamic NTK scaling that `max_model_len` would activate.
    """
    notes = []
    for name, module in model.named_modules():
        rope_type = getattr(module, "rope_type", None)
        for layer_type, kind in _types(rope_type):
            note = _freeze_module(cast(Any, module), layer_type, kind, max_model_len)
            if note is not None:
                notes.append(f"{name}: {note}")
    return tuple(notes)


def _types(rope_type: object) -> list[tuple[str | None, str]]:
    if isinstance(rope_type, str):
        return [(None, rope_type)]
    return list(rope_type.items()) if isinstance(rope_type, dict) else []


def _freeze_module(
    module: Any, layer_type: str | None, kind: str, max_model_len: int
) -> str | None:
    if kind != "longrope" and "dynamic" not in kind:
        return None
    parameters = module.config.rope_parameters
    if layer_type is not None:
        parameters = parameters[layer_type]
    original = parameters.get("original_max_position_embeddings") or (
        module.config.max_position_embeddings
    )
    scaled = max_model_len > original
    if kind == "longrope":
        _set_longrope(module, layer_type, original, scaled)
    elif scaled:
        raise UnsupportedModelError(
            f"{kind!r} rotary scaling beyond {original} tokens changes with the longest request of "
            f"a step, which no engine can reproduce: build with --max-model-len {original}"
        )
    _mark_static(module, layer_type)
    chosen = "scaled" if scaled else "original"
    return f"{kind} frequencies frozen to the {chosen} set for max_model_len {max_model_len}"


def _set_longrope(module: Any, layer_type: str | None, original: int, scaled: bool) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    length = original + 1 if scaled else original
    arguments = {} if layer_type is None else {"layer_type": layer_type}
    frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](
        module.config, torch.device("cpu"), seq_len=length, **arguments
    )
    prefix = "" if layer_type is None else f"{layer_type}_"
    getattr(module, f"{prefix}inv_freq").copy_(frequencies)


def _mark_static(module: Any, layer_type: str | None) -> None:
    """transformers recomputes frequencies only for the types it knows as changing."""
    if layer_type is None:
        module.rope_type = "default"
    else:
        module.rope_type = {**module.rope_type, layer_type: "default"}
