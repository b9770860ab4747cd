"""Multi-token prediction layers, trained with their model (DeepSeek-V3, MiMo-7B)."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config, PreTrainedConfig, Qwen2Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3RMSNorm,
    DeepseekV3RotaryEmbedding,
)
from transformers.models.qwen2.modeling_qwen2 import (
    Qwen2DecoderLayer,
    Qwen2RMSNorm,
    Qwen2RotaryEmbedding,
)

from octavo.graphs.drafters.base import PagedDrafter


class _Mtp(PagedDrafter):
    """The embedding of the token at position 0 of the layer counts as zero, as in training."""

    def __init__(self, config: PreTrainedConfig, vocab_size: int) -> None:
        super().__init__()
        size = int(config.hidden_size)
        self.config = config
        self.feature_size = self.hidden_size = size
        self.embed_tokens = nn.Embedding(vocab_size, size)
        self.head = nn.Linear(size, vocab_size, bias=False)
        self.rotary_emb: nn.Module
        self.block: nn.Module

    @abstractmethod
    def _join(self, embedded: Tensor, features: Tensor) -> Tensor:
        """[T, h] each -> [T, h], the input of the decoder layer."""

    def _decode(self, token_ids: Tensor, positions: Tensor, features: Tensor) -> Tensor:
        """[T, h]: what the decoder layer makes of tokens and features."""
        embedded = self.embed_tokens(token_ids)
        embedded = torch.where(positions[:, None] > 0, embedded, torch.zeros_like(embedded))
        hidden = self._join(embedded, features.to(embedded.dtype))[None]
        angles = self.rotary_emb(hidden, positions[None])
        decoded = self.block(
            hidden, position_embeddings=angles, position_ids=positions[None], use_cache=False
        )
        return cast(Tensor, decoded[0])


class DeepseekMtp(_Mtp):
    """`eh_proj` reads embedding and feature; further drafts read the layer's own output.

    DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.2.
    """

    def __init__(self, config: DeepseekV3Config, vocab_size: int) -> None:
        super().__init__(config, vocab_size)
        size, epsilon = self.hidden_size, config.rms_norm_eps
        self.enorm = DeepseekV3RMSNorm(size, eps=epsilon)
        self.hnorm = DeepseekV3RMSNorm(size, eps=epsilon)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.rotary_emb = DeepseekV3RotaryEmbedding(config)
        # The layer behind the model's own: one with experts where the last ones have them.
        self.block = DeepseekV3DecoderLayer(config, int(config.num_hidden_layers))
        self.norm = DeepseekV3RMSNorm(size, eps=epsilon)

    def forward(
        self, token_ids: Tensor, positions: Tensor, features: Tensor, rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        chosen = self._decode(token_ids, positions, features)[rows]
        return self.head(self.norm(chosen)), chosen

    def _join(self, embedded: Tensor, features: Tensor) -> Tensor:
        joined: Any = torch.cat([self.enorm(embedded), self.hnorm(features)], dim=-1)
        return cast(Tensor, self.eh_proj(joined))


class MimoMtp(_Mtp):
    """`input_proj` reads feature and embedding; further drafts read the normed output.

    Xiaomi LLM-Core Team, "MiMo: Unlocking the Reasoning Potential of Language Model", 2025.
    """

    def __init__(self, config: Qwen2Config, vocab_size: int) -> None:
        super().__init__(config, vocab_size)
        size, epsilon = self.hidden_size, config.rms_norm_eps
        self.token_layernorm = Qwen2RMSNorm(size, eps=epsilon)
        self.hidden_layernorm = Qwen2RMSNorm(size, eps=epsilon)
        self.input_proj = nn.Linear(2 * size, size, bias=False)
        self.rotary_emb = Qwen2RotaryEmbedding(config)
        self.block = Qwen2DecoderLayer(config, 0)
        self.final_layernorm = Qwen2RMSNorm(size, eps=epsilon)

    def forward(
        self, token_ids: Tensor, positions: Tensor, features: Tensor, rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        chosen = self.final_layernorm(self._decode(token_ids, positions, features)[rows])
        return self.head(chosen), chosen

    def _join(self, embedded: Tensor, features: Tensor) -> Tensor:
        joined: Any = torch.cat(
            [self.hidden_layernorm(features), self.token_layernorm(embedded)], dim=-1
        )
        return cast(Tensor, self.input_proj(joined))
