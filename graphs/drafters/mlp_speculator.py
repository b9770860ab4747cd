"""IBM's MLP speculator (Wertheimer et al., 2024, https://arxiv.org/abs/2404.19124)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from octavo.graphs.drafters.base import HeadsDrafter

_EPSILON = 1e-6


class ScaledShiftedNorm(nn.Module):
    """Root mean square norm with a weight and a bias."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * normalised(x) + self.bias


def normalised(x: Tensor) -> Tensor:
    """x over its root mean square; computed in float32."""
    wide = x.float()
    mean_square = wide.pow(2).mean(-1, keepdim=True)
    return (wide * torch.rsqrt(mean_square + _EPSILON)).to(x.dtype)


class MLPSpeculator(HeadsDrafter):
    """Each stage reads the state before it and the token drafted before it, greedily.

    n_predict     stages that it was trained with: they share out the weights of state and token
    inner_size    of the states; 0 is the hidden size
    is_tied       all stages share embedding, head and norm, and all but the first the projection
    scales_input  the target's hidden state is normalised and divided by sqrt(2)
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        inner_size: int,
        vocab_size: int,
        n_predict: int,
        num_heads: int,
        is_tied: bool,
        scales_input: bool,
    ) -> None:
        super().__init__()
        inner = inner_size or hidden_size
        self.feature_size = hidden_size
        self.num_heads = num_heads
        num_own = 1 if is_tied else num_heads
        self.emb = nn.ModuleList(nn.Embedding(vocab_size, inner) for _ in range(num_own))
        self.head = nn.ModuleList(nn.Linear(inner, vocab_size, bias=False) for _ in range(num_own))
        self.ln = nn.ModuleList(ScaledShiftedNorm(inner) for _ in range(num_own))
        # The first one's input has another size, so that it is never shared.
        num_projections = min(2, num_heads) if is_tied else num_heads
        self.proj = nn.ModuleList(
            nn.Linear(inner if stage else hidden_size, inner, bias=False)
            for stage in range(num_projections)
        )
        self._scales_input = scales_input
        # By the last stage the target's state has half of the magnitude.
        self._state_weight = 0.5 ** (0.5 / n_predict)
        self._token_weight = math.sqrt((1 - self._state_weight**2) * (inner / 2))

    def forward(self, token_ids: Tensor, features: Tensor) -> Tensor:
        state = features.to(next(self.parameters()).dtype)
        if self._scales_input:
            state = normalised(state) / math.sqrt(2)
        rows: list[Tensor] = []
        for stage in range(self.num_heads):
            if rows:
                token_ids = rows[-1].topk(1, dim=-1).indices[:, 0]
            token = _stage(self.emb, stage)(token_ids)
            state = _stage(self.proj, stage)(state) * self._state_weight
            state = state + token * self._token_weight
            state = functional.gelu(_stage(self.ln, stage)(state))
            rows.append(_stage(self.head, stage)(state))
        return torch.stack(rows, dim=1).flatten(0, 1)


def _stage(modules: nn.ModuleList, stage: int) -> nn.Module:
    """A stage's own module; the last one is that of all stages after it too."""
    return modules[min(stage, len(modules) - 1)]
