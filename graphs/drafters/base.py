"""What the compiler captures of a drafter: two shapes of modules, with and without a cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class PagedDrafter(nn.Module, ABC):
    """A decoder layer over tokens and hidden states, with a paged cache of its own.

    At position p of a sequence it takes the token at p + 1 and the target's hidden state at p, and
    predicts the token at p + 2; further drafts take its own hidden states. Its attention goes
    through transformers' attention interface, with the implementation that `config` names.

    config        of its decoder layer, in transformers' terms
    feature_size  F, of a hidden state that it reads
    hidden_size   h, of a hidden state that it returns: F, since it reads them again
    """

    config: PreTrainedConfig
    feature_size: int
    hidden_size: int

    @abstractmethod
    def forward(
        self, token_ids: Tensor, positions: Tensor, features: Tensor, rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """token_ids i64 [T], positions i64 [T], features [T, F], rows i64 [L], indices into T.

        Returns logits [L, V] over the target's vocabulary and hidden states [L, h].
        """


class HeadsDrafter(nn.Module, ABC):
    """Predicts `num_heads` tokens of each sequence at once from one hidden state.

    feature_size  F, of a hidden state
    num_heads     k, the drafts of a sequence
    """

    feature_size: int
    num_heads: int

    @abstractmethod
    def forward(self, token_ids: Tensor, features: Tensor) -> Tensor:
        """token_ids i64 [T], the last token of each sequence; features [T, F], what it came from.

        Returns logits [T * k, V], the row `s * k + j` for draft j of sequence s.
        """


def over_vocabulary(logits: Tensor, columns: Tensor) -> Tensor:
    """[R, D] -> [R, V]: logits of the tokens that are drafted, -inf for the others.

    columns  i64 [V], the column of every token, D for those that are never drafted
    """
    never = torch.full_like(logits[:, :1], -torch.inf)
    return torch.cat([logits, never], dim=-1).index_select(1, columns)
