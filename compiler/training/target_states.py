"""The target's hidden states of every sequence, computed once: they cost more than the training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from octavo.compiler.hidden_states import CaptureHidden, HiddenStatesTap


class TargetStates:
    """Kept as float16, up to `max_bytes` of them; what finds no place is computed again.

    A sequence is always computed with the same others, so its states are the same bits whenever
    they are asked for.

    groups  which sequences are computed together, by index, each in one group
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: tuple[int, ...],
        sequences: Sequence[Sequence[int]],
        groups: Sequence[Sequence[int]],
        max_bytes: int,
    ) -> None:
        self._decoder: Any = model
        self._sequences = sequences
        self._group_of = {index: group for group in groups for index in group}
        wanted = CaptureHidden(rows="all", source="layers", layers=layers)
        self._features = HiddenStatesTap(model, wanted)
        self._last = HiddenStatesTap(model, CaptureHidden(rows="all", source="post_norm"))
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        self._bytes_left = max_bytes

    def of(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Of these sequences, padded behind: what goes into the layers [B, T, layers * h] and
        what the output embedding reads [B, T, h], both f32."""
        found = dict(self._kept)
        for index in indices:
            if index not in found:
                found |= self._compute(self._group_of[index])
        length = max(len(self._sequences[index]) for index in indices)
        parts = [found[index] for index in indices]
        features, last = (
            torch.stack(
                [torch.nn.functional.pad(one[kind], (0, 0, 0, length - len(one[kind])))
                 for one in parts]
            ).float()
            for kind in (0, 1)
        )  # fmt: skip
        return features, last

    @torch.no_grad()
    def _compute(self, group: Sequence[int]) -> dict[int, tuple[Tensor, Tensor]]:
        token_ids, _ = padded([self._sequences[index] for index in group])
        with self._features.listening(), self._last.listening():
            self._decoder.get_decoder()(input_ids=token_ids, use_cache=False)
        features, last = self._features.read_all().half(), self._last.read_all().half()
        states = {
            index: (features[row, :length].clone(), last[row, :length].clone())
            for row, index in enumerate(group)
            for length in [len(self._sequences[index])]
        }
        size = sum(2 * (a.numel() + b.numel()) for a, b in states.values())
        if size <= self._bytes_left:
            self._bytes_left -= size
            self._kept |= states
        return states


def padded(sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """token_ids i64 [B, T], padded behind, where nothing looks; lengths i64 [B]."""
    lengths = torch.tensor([len(one) for one in sequences])
    token_ids = torch.zeros(len(sequences), int(lengths.max()), dtype=torch.int64)
    for row, one in zip(token_ids, sequences, strict=True):
        row[: len(one)] = torch.tensor(one)
    return token_ids, lengths
