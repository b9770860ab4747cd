"""Medusa's heads (Cai et al., 2024, https://arxiv.org/abs/2401.10774)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from octavo.graphs.drafters.base import HeadsDrafter, over_vocabulary


class ResidualBlock(nn.Module):
    """x + silu(linear(x)), layer after layer."""

    def __init__(self, hidden_size: int, num_layers: int, *, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(hidden_size, hidden_size, bias=bias) for _ in range(num_layers)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """[T, h] -> [T, h]."""
        for layer in self.layers:
            hidden = hidden + functional.silu(layer(hidden))
        return hidden


class Medusa(HeadsDrafter):
    """Head j predicts the j-th token after the last one, from the hidden state alone.

    shares_lm_head   one output embedding for all heads, `lm_heads.0`
    num_head_tokens  rows of an output embedding: fewer than the vocabulary where only frequent
                     tokens are drafted. Then the buffer `columns` i64 [V] has the row of every
                     token, and `num_head_tokens` for those that are never drafted.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        vocab_size: int,
        num_heads: int,
        num_layers: int,
        bias: bool,
        shares_lm_head: bool,
        num_head_tokens: int,
        logit_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.feature_size = hidden_size
        self.num_heads = num_heads
        self.blocks = nn.ModuleList(
            ResidualBlock(hidden_size, num_layers, bias=bias) for _ in range(num_heads)
        )
        self.lm_heads = nn.ModuleList(
            nn.Linear(hidden_size, num_head_tokens, bias=False)
            for _ in range(1 if shares_lm_head else num_heads)
        )
        self._logit_scale = logit_scale
        self._is_truncated = num_head_tokens < vocab_size
        if self._is_truncated:
            self.register_buffer("columns", torch.zeros(vocab_size, dtype=torch.int64))

    def forward(self, token_ids: Tensor, features: Tensor) -> Tensor:
        """token_ids are not read: the hidden state [T, h] has seen what led to them."""
        hidden = features.to(next(self.parameters()).dtype)
        states = [block(hidden) for block in self.blocks]
        if len(self.lm_heads) == 1:
            # One product reads the largest matrix of all once instead of for every head.
            logits = self.lm_heads[0](torch.stack(states, dim=1).flatten(0, 1))
        else:
            rows = [head(state) for head, state in zip(self.lm_heads, states, strict=True)]
            logits = torch.stack(rows, dim=1).flatten(0, 1)
        if self._logit_scale != 1.0:
            logits = logits * self._logit_scale
        return over_vocabulary(logits, self.get_buffer("columns")) if self._is_truncated else logits
