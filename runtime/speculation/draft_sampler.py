"""Chooses draft tokens from a drafter's logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.backends.base import Float32Array
from octavo.runtime.request import Request
from octavo.runtime.sampling.sampler import Sampler, SamplingRow
from octavo.runtime.sampling.sampling_params import SamplingParams
from octavo.runtime.speculation.drafter import Proposal

NO_TOKEN = -1  # where the logits name none


class DraftSampler:
    """Draws as the target will draw: with the request's parameters, and its very random numbers.

    The likelier it is then that both agree. With `returns_probs` random drafts come from random
    numbers of their own and carry their distribution, as rejection sampling needs them.
    """

    def __init__(self, sampled_vocab_size: int, *, returns_probs: bool = False) -> None:
        self._sampler = Sampler(sampled_vocab_size)
        self._vocab_size = sampled_vocab_size
        self.returns_probs = returns_probs

    def choose(
        self, requests: Sequence[Request], logits: Float32Array, num_drafts: int
    ) -> list[tuple[int, Float32Array | None]]:
        """A token, NO_TOKEN for none, and its distribution [V] for each row of logits [L, V].

        Row i continues `requests[i]`, which has `num_drafts` drafts already.
        """
        rows = [
            SamplingRow(row, request.params, request.seed, request.num_tokens + num_drafts,
                        request.choice)
            for request, row in zip(requests, logits, strict=True)
        ]  # fmt: skip
        if not self.returns_probs:
            return [(token, None) for token in self._sampler.sample(rows)]
        certain = iter(self._sampler.sample([row for row in rows if row.params.greedy]))
        return [(next(certain), None) if row.params.greedy else self._draw(row) for row in rows]

    def _draw(self, row: SamplingRow) -> tuple[int, Float32Array | None]:
        probs = distribution(row.logits[: self._vocab_size], row.params)
        if not np.isfinite(probs).all():
            return NO_TOKEN, None
        # A generator of its own for each token; the acceptance draws from other counters.
        bits = np.random.Philox(key=row.seed, counter=[row.position, row.choice, 1, 1])
        point = np.random.Generator(bits).random()
        cumulative = np.cumsum(probs, dtype=np.float64)
        token = int(np.searchsorted(cumulative, point * cumulative[-1], side="right"))
        return token, probs


def distribution(logits: Float32Array, params: SamplingParams) -> Float32Array:
    """[V] f32, summing to 1: a drafter's guess at what temperature, top-k and top-p leave."""
    scaled = logits.astype(np.float64) / params.temperature
    if 0 < params.top_k < len(scaled):
        scaled[scaled < np.partition(scaled, -params.top_k)[-params.top_k]] = -np.inf
    weights = np.exp(scaled - scaled.max())
    weights /= weights.sum()
    if params.min_p > 0:
        weights[weights < params.min_p * weights.max()] = 0.0
    if params.top_p < 1.0:
        order = np.argsort(-weights, kind="stable")
        before = np.cumsum(weights[order]) - weights[order]
        weights[order[before >= params.top_p]] = 0.0
    kept: Float32Array = (weights / weights.sum()).astype(np.float32)
    return kept


def proposals(chosen: Sequence[list[tuple[int, Float32Array | None]]]) -> list[Proposal]:
    """What was chosen for each sequence, draft after draft; all have probabilities, or none has."""
    made = []
    for drafts in chosen:
        tokens = [token for token, _ in drafts]
        probs = [row for _, row in drafts if row is not None]
        made.append(Proposal(tokens, np.stack(probs) if probs else None))
    return made
