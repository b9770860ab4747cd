"""EAGLE-3 (Li et al., 2025, https://arxiv.org/abs/2503.01840): tokens and fused features."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from octavo.graphs.drafters.base import PagedDrafter, over_vocabulary


class Eagle3Layer(nn.Module):
    """A Llama layer whose attention reads embedding and feature side by side.

    norms_residual  whether the feature is normed before it is the residual as well
    """

    def __init__(self, config: LlamaConfig, *, norms_residual: bool) -> None:
        super().__init__()
        size, epsilon = int(config.hidden_size), config.rms_norm_eps
        self.hidden_norm = LlamaRMSNorm(size, eps=epsilon)
        self.input_layernorm = LlamaRMSNorm(size, eps=epsilon)
        self.self_attn = LlamaAttention(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = cast(nn.Linear, getattr(self.self_attn, name))
            wide = nn.Linear(2 * size, narrow.out_features, bias=narrow.bias is not None)
            setattr(self.self_attn, name, wide)
        self.post_attention_layernorm = LlamaRMSNorm(size, eps=epsilon)
        self.mlp: nn.Module = cast(Any, LlamaMLP)(config)
        self._norms_residual = norms_residual

    def residual(self, features: Tensor, normed: Tensor) -> Tensor:
        """What the attention's result is added to."""
        return normed if self._norms_residual else features

    def forward(
        self, embedded: Tensor, features: Tensor, angles: tuple[Tensor, Tensor], positions: Tensor
    ) -> Tensor:
        """embedded, features [1, T, h], positions i64 [1, T] -> [1, T, h]."""
        normed = self.hidden_norm(features)
        residual = self.residual(features, normed)
        joined = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        attended, _ = self.self_attn(
            hidden_states=joined,
            position_embeddings=angles,
            position_ids=positions,
            attention_mask=None,
        )
        hidden = residual + attended
        return cast(Tensor, hidden + self.mlp(self.post_attention_layernorm(hidden)))


class Eagle3(PagedDrafter):
    """Features of the target are fused before they come here (`CaptureHidden.projection`).

    num_head_tokens  rows of the output embedding: fewer than the vocabulary where only frequent
                     tokens are drafted. Then the buffer `columns` i64 [V] has the row of every
                     token, and `num_head_tokens` for those that are never drafted.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        vocab_size: int,
        num_head_tokens: int,
        norms_residual: bool = False,
    ) -> None:
        super().__init__()
        size = int(config.hidden_size)
        self.config = config
        self.feature_size = self.hidden_size = size
        self.embed_tokens = nn.Embedding(vocab_size, size)
        self.midlayer = Eagle3Layer(config, norms_residual=norms_residual)
        self.norm = LlamaRMSNorm(size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.lm_head = nn.Linear(size, num_head_tokens, bias=False)
        self._is_truncated = num_head_tokens < vocab_size
        if self._is_truncated:
            self.register_buffer("columns", torch.zeros(vocab_size, dtype=torch.int64))

    def forward(
        self, token_ids: Tensor, positions: Tensor, features: Tensor, rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        embedded = self.embed_tokens(token_ids)[None]
        given = features.to(embedded.dtype)[None]
        angles = self.rotary_emb(embedded, positions[None])
        hidden = self.midlayer(embedded, given, angles, positions[None])
        chosen = hidden[0][rows]
        logits = self.lm_head(self.norm(chosen))
        if self._is_truncated:
            logits = over_vocabulary(logits, self.get_buffer("columns"))
        return logits, chosen
