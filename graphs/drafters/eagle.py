"""EAGLE (Li et al., 2024, https://arxiv.org/abs/2401.15077): a decoder layer over features."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from octavo.graphs.drafters.base import PagedDrafter


class Eagle(PagedDrafter):
    """The first layer has no norm before its attention, and no norm stands behind the last."""

    def __init__(self, config: LlamaConfig, *, vocab_size: int, fc_bias: bool) -> None:
        super().__init__()
        size = int(config.hidden_size)
        self.config = config
        self.feature_size = self.hidden_size = size
        self.embed_tokens = nn.Embedding(vocab_size, size)
        self.fc = nn.Linear(2 * size, size, bias=fc_bias)
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(config, index) for index in range(int(config.num_hidden_layers))
        )
        self.layers[0].input_layernorm = nn.Identity()
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.lm_head = nn.Linear(size, vocab_size, bias=False)

    def forward(
        self, token_ids: Tensor, positions: Tensor, features: Tensor, rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        embedded = self.embed_tokens(token_ids)
        hidden = self.fc(torch.cat([embedded, features.to(embedded.dtype)], dim=-1))[None]
        angles = self.rotary_emb(hidden, positions[None])
        for layer in self.layers:
            hidden = layer(
                hidden, position_embeddings=angles, position_ids=positions[None], use_cache=False
            )
        chosen = cast(Any, hidden)[0][rows]
        return self.lm_head(chosen), chosen
