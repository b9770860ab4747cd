"""The arithmetic behind the null backend's tokens.

A context's hash is sum((token[p] + 1) * BASE**(p + 1)) modulo 2**64, mixed once more: it depends on
every token and on its position, and running sums give it for all positions of a sequence at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

UInt64Array = NDArray[np.uint64]

_BASE = 0x9E3779B97F4A7C15  # odd, so that its powers never vanish modulo 2**64


def powers(count: int) -> UInt64Array:
    """[count] u64: the factor of each position."""
    return np.cumprod(np.full(count, _BASE, dtype=np.uint64), dtype=np.uint64)


def next_tokens(
    token_ids: NDArray[np.int64], factors: UInt64Array, vocab_size: int
) -> NDArray[np.int64]:
    """[..., n] tokens of sequences from position 0; the token that follows after each of them."""
    hashes = np.cumsum((token_ids + 1).astype(np.uint64) * factors, axis=-1)
    # The finaliser of splitmix64: the low bits alone would depend on few bits of the sum.
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    hashes ^= hashes >> np.uint64(31)
    tokens: NDArray[np.int64] = (hashes % np.uint64(vocab_size)).astype(np.int64)
    return tokens


def expected_next_token(tokens: Sequence[int], vocab_size: int) -> int:
    """The token that the null backend finds most likely after `tokens`."""
    ids = np.array(tokens, dtype=np.int64)
    return int(next_tokens(ids, powers(len(ids)), vocab_size)[-1])
