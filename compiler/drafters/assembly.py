"""A drafter's module from its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from octavo.graphs.drafters.base import PagedDrafter

Drafter = TypeVar("Drafter", bound=PagedDrafter)


def with_weights(make: Callable[[], Drafter], state: Mapping[str, Tensor]) -> Drafter:
    """What `make` makes, on the CPU, in eval mode, with the tensors of `state` as they are.

    Its rotary frequencies are float32 whatever the weights are, as they are in the target: in
    bfloat16 a token at position 1000 would be turned by up to a radian too much.
    """
    with torch.device("meta"):  # every weight is replaced: none is drawn at random before
        module = make()
    owner: Any = module
    owner.rotary_emb = type(owner.rotary_emb)(module.config)
    module.load_state_dict(state, assign=True)
    return module.eval()
