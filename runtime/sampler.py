"""Chooses one token for each row of logits: greedy, or by temperature, then top-k, then top-p.

A row's token depends on its logits, its parameters, its seed and its position only, bit for bit:
rows never share a computation, and random numbers come from a counter. The set of kept tokens
follows vLLM: top-k keeps every token that ties with the k-th; top-p keeps the smallest set of most
likely tokens that reaches p, of the tokens that top-k has left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.backends.base import Float32Array
from octavo.graphs.errors import BackendError
from octavo.runtime.philox import uniform
from octavo.runtime.sampling_params import SamplingParams

IndexArray = NDArray[np.intp]

# Long rows are first reduced to groups: maxima bound the k-th largest logit, sums locate a draw.
_GROUP = 64
_SUM_GROUP = 256
# Candidates of top-p lie above `largest scaled logit - reach`; each reach is tried if the one
# before held too little probability.
_REACHES = (3.0, 6.0, 12.0)


class SamplingRow(NamedTuple):
    """What choosing a row's token depends on besides the logits."""

    params: SamplingParams
    seed: int
    position: int  # of the token to be sampled


class Sampler:
    """`sampled_vocab_size`: ids from this one on are padding of the vocabulary, never sampled."""

    def __init__(self, sampled_vocab_size: int) -> None:
        self._vocab_size = sampled_vocab_size

    def sample(self, logits: Float32Array, rows: Sequence[SamplingRow]) -> list[int]:
        """One token id for each row of `logits` [L, V]; BackendError if a row has NaN or +inf."""
        logits = logits[:, : self._vocab_size]
        return [
            _greedy(row_logits) if row.params.greedy else _draw(row_logits, row)
            for row_logits, row in zip(logits, rows, strict=True)
        ]


def _greedy(logits: Float32Array) -> int:
    """[V]: the first of the largest logits."""
    token = int(logits.argmax())  # of a NaN, should there be one
    _check_finite(float(logits[token]))
    return token


def _check_finite(largest: float) -> None:
    if not math.isfinite(largest):
        raise BackendError(
            f"the engine returned logits whose largest value is {largest}: no token can be chosen, "
            "check the model with `octavo verify`"
        )


def _draw(logits: Float32Array, row: SamplingRow) -> int:
    """[V]: draws from the distribution that the row's parameters leave."""
    params = row.params
    largest = logits.max()
    _check_finite(float(largest))
    ids: IndexArray | None = None  # None = all tokens
    if 0 < params.top_k < len(logits):
        ids = _top_k(logits, params.top_k)
        logits = logits[ids]
    # At most 0, so that nothing overflows however low the temperature.
    scaled = (logits - largest) / np.float32(params.temperature)
    weights = np.exp(scaled)
    if params.top_p < 1.0:
        kept = _top_p(scaled, weights, params.top_p)
        weights = weights[kept]
        ids = kept if ids is None else ids[kept]
    index = _inverse_cdf(weights, uniform(row.seed, row.position))
    return index if ids is None else int(ids[index])


def _top_k(logits: Float32Array, k: int) -> IndexArray:
    """Ids, ascending, of the tokens whose logit is at least the k-th largest."""
    candidates = logits
    num_groups = len(logits) // _GROUP
    if k <= num_groups:
        # k groups have a maximum of at least `bound`, so the k-th largest logit is not below it.
        # (The groups are interleaved: numpy reduces over the first axis several times faster.)
        maxima = logits[: num_groups * _GROUP].reshape(_GROUP, num_groups).max(axis=0)
        bound = np.partition(maxima, num_groups - k)[num_groups - k]
        candidates = logits[logits >= bound]
    threshold = np.partition(candidates, len(candidates) - k)[len(candidates) - k]
    return np.flatnonzero(logits >= threshold)


def _top_p(scaled: Float32Array, weights: Float32Array, top_p: float) -> IndexArray:
    """Indices, ascending, of the smallest set of largest weights that reaches `top_p` of the sum.

    scaled [n], weights = exp(scaled) [n]. Of equal weights the first ones are taken.
    """
    goal = top_p * float(weights.sum(dtype=np.float64))
    candidates = weights
    for reach in _REACHES:
        above = weights[scaled >= -reach]
        if float(above.sum(dtype=np.float64)) >= goal:
            candidates = above
            break
    # Values alone sort several times faster than indices do.
    descending = -np.sort(-candidates)
    cumulative = np.cumsum(descending, dtype=np.float64)
    count = min(int(np.searchsorted(cumulative, goal)) + 1, len(descending))
    threshold = descending[count - 1]
    kept = np.flatnonzero(weights >= threshold)
    if len(kept) > count:
        ties = np.flatnonzero(weights[kept] == threshold)
        kept = np.delete(kept, ties[count - len(kept) :])
    return kept


def _inverse_cdf(weights: Float32Array, u: float) -> int:
    """The first index at which the cumulative weight passes the fraction `u` of the sum."""
    starts = np.arange(0, len(weights), _SUM_GROUP)
    cumulative = np.cumsum(np.add.reduceat(weights, starts, dtype=np.float64))
    goal = u * cumulative[-1]
    group = int(np.searchsorted(cumulative, goal, side="right"))
    if group < len(cumulative):
        start = group * _SUM_GROUP
        before = cumulative[group - 1] if group else 0.0
        within = before + np.cumsum(weights[start : start + _SUM_GROUP], dtype=np.float64)
        index = start + int(np.searchsorted(within, goal, side="right"))
        if index < len(weights) and weights[index] > 0.0:
            return index
    # The goal fell on a rounding error at the end of a sum: the draw is the last possible token
    # before it.
    end = min((group + 1) * _SUM_GROUP, len(weights))
    return int(np.flatnonzero(weights[:end])[-1])
