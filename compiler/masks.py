"""Which keys a layer sees, read from the mask functions that HF's modelling code asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# (batch index, head index, query positions, key positions) -> visible, as transformers defines it.
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class MaskRule:
    """What `octavo::paged_attention` can express of a mask. It travels through HF's code in the
    place of a mask tensor, so each layer tells which rule it was given."""

    causal: bool
    sliding_window: int  # 0: all keys
    expressible: bool = True  # False: the mask is another one (chunked, block-wise, ...)

    def visible(self, query: Tensor, key: Tensor) -> Tensor:
        seen = torch.ones_like(query + key, dtype=torch.bool)
        if self.causal:
            seen &= key <= query
        if self.sliding_window:
            seen &= query - key < self.sliding_window
        return seen


def infer_rule(mask_function: MaskFunction, max_position: int) -> MaskRule:
    """The rule that equals `mask_function` at sampled query positions up to `max_position`.

    Models prepare masks that none of their layers use, so a mask that no rule equals is no error
    yet: its rule is marked inexpressible.
    """
    last = max_position - 1
    samples = {0, 1, 2, 3, 5, 17, last // 3, last // 2, last - 1, last}
    query = torch.tensor(sorted(q for q in samples if 0 <= q <= last))[:, None]
    key = torch.arange(max_position)[None, :]
    zero = torch.zeros((), dtype=torch.long)
    seen = mask_function(zero, zero, query, key)
    seen = torch.as_tensor(seen).broadcast_to(query.shape[0], key.shape[1])
    causal = not bool(seen[key.expand_as(seen) > query].any())
    count_at_last = int(seen[-1, : last + 1].sum())
    rule = MaskRule(causal, 0 if count_at_last == max_position else count_at_last)
    return replace(rule, expressible=torch.equal(rule.visible(query, key), seen))
