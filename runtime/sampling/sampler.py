"""Chooses one token for each row of logits: greedy, or by temperature, min-p, top-k, then top-p.

A row's token depends on its logits, its parameters, its seed, position and choice only, bit for
bit: rows never share a computation, and random numbers come from a counter. The set of kept tokens
follows vLLM: min-p keeps tokens with at least that share of the largest probability; top-k keeps
every token that ties with the k-th; top-p keeps the smallest set of most likely tokens that reaches
p, of those that the others have left, and of ties at its edge the first ids.

The arithmetic is native: see `backends/kernels/README.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.backends.base import Float32Array, Int32Array
from octavo.backends.kernels.sampling import SamplingKernel
from octavo.graphs.errors import BackendError
from octavo.runtime.sampling.sampling_params import SamplingParams


class SamplingRow(NamedTuple):
    """What choosing a row's token depends on."""

    logits: Float32Array  # [V] contiguous: a row of the step's logits, or an edited copy of it
    params: SamplingParams
    seed: int  # of 64 bits
    position: int  # of the token to be sampled
    choice: int = 0  # which of a request's completions: each has its own random numbers


class LogprobsRow(NamedTuple):
    """A token whose log-probability is asked for, with those of its row's most likely tokens."""

    logits: Float32Array  # [V] contiguous, as the model gave them
    token_id: int
    num_logprobs: int  # of the most likely tokens; 0 for none, at most those of the vocabulary


class RowLogprobs(NamedTuple):
    """Natural logarithms, summed in float64. NaN, ranks and ids -1 where logits are not finite."""

    logprob: float  # of the row's token; -inf outside of the sampled vocabulary
    rank: int  # 1 + the number of tokens with a larger logit
    token_ids: Int32Array  # [num_logprobs], most likely first, of ties the lower id
    logprobs: NDArray[np.float64]  # [num_logprobs]


class Sampler:
    """`sampled_vocab_size`: ids from this one on are padding of the vocabulary.

    They are never sampled and have no probability. Raises BackendError where there are no native
    kernels, or OCTAVO_CPU_ISA names none of them. `kernel`: another one than Octavo's best.
    """

    def __init__(self, sampled_vocab_size: int, kernel: SamplingKernel | None = None) -> None:
        self._kernel = kernel or SamplingKernel()
        self._vocab_size = sampled_vocab_size
        if not 1 <= sampled_vocab_size <= self._kernel.most_columns:
            raise BackendError(
                f"a vocabulary of {sampled_vocab_size} tokens is to be sampled and the kernels sum "
                f"1 to {self._kernel.most_columns} without rounding: use a model with fewer"
            )

    def sample(self, rows: Sequence[SamplingRow]) -> list[int]:
        """One token id for each row; -1 where a logit is NaN or the largest is not finite."""
        vocab_size = self._vocab_size
        values: list[int | float] = []
        for logits, params, seed, position, choice in rows:
            address = _address(logits, vocab_size)
            temperature = 0.0 if params.greedy else params.temperature
            top_k = min(max(params.top_k, 0), vocab_size)
            values += (
                address, seed, position, temperature, params.top_p, params.min_p, top_k, choice
            )  # fmt: skip
        return self._kernel.sample(values, len(rows), vocab_size)

    def logprobs(self, rows: Sequence[LogprobsRow]) -> list[RowLogprobs]:
        """The log-softmax of each row over the sampled vocabulary, where it is asked for."""
        vocab_size = self._vocab_size
        values: list[int] = []
        starts, ends = [], []
        end = 0
        for logits, token_id, num_logprobs in rows:
            count = min(num_logprobs, vocab_size)
            values += (_address(logits, vocab_size), token_id, count)
            starts.append(end)
            end += count
            ends.append(end)
        found = self._kernel.logprobs(values, len(rows), end, vocab_size)
        return [
            RowLogprobs(logprob, rank, found.top_ids[start:end], found.top_logprobs[start:end])
            for logprob, rank, start, end in zip(
                found.logprobs, found.ranks, starts, ends, strict=True
            )
        ]


def _address(logits: Float32Array, vocab_size: int) -> int:
    """Of a row; native code reads `vocab_size` floats from there on."""
    fits = logits.ndim == 1 and len(logits) >= vocab_size
    if not fits or logits.dtype != np.float32 or not logits.flags.c_contiguous:
        raise BackendError(
            f"logits are {logits.dtype} {list(logits.shape)} with strides {logits.strides} and the "
            f"sampler reads float32 [{vocab_size}]: give it contiguous rows of at least that length"
        )
    address: int = logits.__array_interface__["data"][0]
    return address
