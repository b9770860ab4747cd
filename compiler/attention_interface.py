"""HF's own modelling code calls `octavo::paged_attention` through the attention interface.

transformers calls a registered function for every attention layer and another for every mask. One
eager run observes both, which gives the attention of each layer; the run under `torch.export` then
replays the observed masks, since tensors have no values there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from octavo.compiler.masks import MaskRule, infer_rule
from octavo.graphs.errors import UnsupportedModelError
from octavo.graphs.ops import paged_attention_torch as _registers_the_operator  # noqa: F401
from octavo.graphs.spec import AttentionSpec

IMPLEMENTATION = "octavo_paged"

# Arguments that do not change what an inference step computes, or that the mask rule covers.
_NEUTRAL_ARGUMENTS = frozenset(
    {
        "cache_position",
        "dropout",
        "is_causal",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "sliding_window",
        "use_cache",
    }
)


class StepContext:
    """The step that a forward pass runs: its index arrays, the caches, and what was observed."""

    def __init__(self, max_position: int) -> None:
        self.max_position = max_position
        self.masks: list[MaskRule] = []
        self.layers: list[AttentionSpec] = []
        self.observing = False
        self._mask_calls = 0
        self._indices: tuple[Tensor, ...] = ()
        self._caches: Sequence[Tensor] = ()
        self._no_operand = torch.zeros(0)
        self.new_caches: list[Tensor] = []

    def begin(self, indices: tuple[Tensor, ...], caches: Sequence[Tensor], none: Tensor) -> None:
        """`indices`: slot_mapping, block_tables, query_start_loc, prefix_offsets."""
        self._mask_calls = 0
        self._indices, self._caches, self._no_operand = indices, caches, none
        self.new_caches = []
        if self.observing:
            self.masks, self.layers = [], []

    def mask(self, mask_function: Any) -> MaskRule:
        if self.observing:
            self.masks.append(infer_rule(mask_function, self.max_position))
        self._mask_calls += 1
        return self.masks[self._mask_calls - 1]

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        spec: AttentionSpec,
        sinks: Tensor | None,
    ) -> Tensor:
        """query [T, H, Dk]; key, value [T, Hkv, D] -> [T, H, Dv]."""
        layer = len(self.new_caches)
        if self.observing:
            self.layers.append(spec)
            attention = query.new_zeros(*query.shape[:2], value.shape[2])
            self.new_caches.append(query)
            return attention
        attention, cache = torch.ops.octavo.paged_attention(
            query,
            key,
            value,
            self._caches[layer],
            *self._indices,
            self._no_operand if sinks is None else sinks.float(),
            self._no_operand,
            spec.scale,
            int(spec.causal),
            spec.sliding_window,
            spec.softcap,
            0,
        )
        self.new_caches.append(cache)
        return cast(Tensor, attention)


_current: StepContext | None = None


@contextmanager
def active(context: StepContext) -> Iterator[None]:
    """Makes `context` the one that HF's code reaches; captures do not nest."""
    global _current
    _current = context
    try:
        yield
    finally:
        _current = None


def _context() -> StepContext:
    if _current is None:
        raise RuntimeError("a model set to octavo_paged attention runs only inside a capture")
    return _current


def _mask_interface(*_: Any, mask_function: Any = None, **__: Any) -> Any:
    return _context().mask(mask_function)


def _attention_interface(
    module: nn.Module,
    query: Tensor,  # [1, H, T, Dk]
    key: Tensor,  # [1, Hkv, T, Dk]
    value: Tensor,  # [1, Hkv, T, Dv]
    attention_mask: Any,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    name = type(module).__name__
    for argument, given in arguments.items():
        if argument not in _NEUTRAL_ARGUMENTS and given is not None:
            raise UnsupportedModelError(
                f"{name} attends with {argument!r}, which paged attention cannot express: "
                "choose another model"
            )
    if isinstance(attention_mask, Tensor):
        raise UnsupportedModelError(
            f"{name} builds an attention mask of its own, which paged attention cannot express: "
            "choose another model"
        )
    causal = arguments.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    rule = attention_mask if isinstance(attention_mask, MaskRule) else MaskRule(bool(causal), 0)
    if not rule.expressible:
        raise UnsupportedModelError(
            f"{name} asks for an attention mask that is neither causal nor a sliding window, which "
            "paged attention cannot express: choose another model, or a --max-model-len at which "
            "its mask is causal"
        )
    if not rule.causal:
        raise UnsupportedModelError(
            f"{name} lets tokens see later tokens, so a prompt cannot be computed in steps: "
            "choose a causal model"
        )
    spec = AttentionSpec(
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=query.shape[3],
        value_head_dim=value.shape[3],
        scale=float(query.shape[3] ** -0.5 if scaling is None else scaling),
        causal=rule.causal,
        sliding_window=rule.sliding_window,
        softcap=float(softcap or 0.0),
        has_sinks=s_aux is not None,
    )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return _context().attend(q, k, v, spec, s_aux)[None], None


AttentionInterface.register(IMPLEMENTATION, _attention_interface)
AttentionMaskInterface.register(IMPLEMENTATION, _mask_interface)
