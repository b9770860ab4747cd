"""The arithmetic of positions, its only home: tokens, blocks, slots and rows of one step.

A sequence's token at position p lies in the block `block_table[p // block_size]` at the offset
`p % block_size`; its flat slot is `block * block_size + offset`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.backends.base import Int32Array


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold the first `num_tokens` tokens of a sequence."""
    return -(-num_tokens // block_size)


def full_blocks(num_tokens: int, block_size: int) -> int:
    """Blocks that the first `num_tokens` tokens fill to the end."""
    return num_tokens // block_size


def tokens_to_compute(num_tokens: int, num_computed_tokens: int, budget: int) -> int:
    """Tokens of a sequence in this step: all that are missing, as far as the budget goes."""
    return min(num_tokens - num_computed_tokens, budget)


def logits_rows(first_logits_position: int, num_computed_tokens: int, num_new_tokens: int) -> int:
    """How many of a sequence's last rows need logits, those from `first_logits_position` on.

    That is the last known token's position: none while the step ends before it (a chunk of a
    prefill), one when it ends there, one more for every draft token fed after it. It is earlier
    while logits of the prompt are wanted.
    """
    end = num_computed_tokens + num_new_tokens
    return max(0, end - max(first_logits_position, num_computed_tokens))


def slot_of(block_ids: Sequence[int], position: int, block_size: int) -> int:
    """The flat cache slot of the token at `position` of a sequence in these blocks."""
    index, offset = divmod(position, block_size)
    return block_ids[index] * block_size + offset


def fill_query_start_loc(counts: Int32Array, out: Int32Array) -> None:
    """`counts` [B] tokens of each sequence; `out` [B+1] where each sequence's tokens start."""
    out[0] = 0
    np.add.accumulate(counts, out=out[1:])


def fill_positions(
    prefix_offsets: Int32Array, query_start_loc: Int32Array, counts: Int32Array, out: Int32Array
) -> None:
    """`out` [T]: each token's position, counting on from its sequence's prefix offset.

    prefix_offsets [B], query_start_loc [B+1], counts [B].
    """
    out[:] = np.arange(len(out), dtype=np.int32)
    out += (prefix_offsets - query_start_loc[:-1]).repeat(counts)


def fill_slots(
    block_tables: Int32Array,
    positions: Int32Array,
    counts: Int32Array,
    block_size: int,
    out: Int32Array,
) -> None:
    """`out` [T]: each token's cache slot. block_tables [B, M], positions [T], counts [B]."""
    index = positions // block_size
    sequence = np.arange(len(counts)).repeat(counts)
    # block * block_size + (position - index * block_size)
    np.multiply(block_tables[sequence, index] - index, block_size, out=out)
    out += positions
