"""Packing steps by hand, to drive an executable without the runtime under test elsewhere."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.backends.base import Executable, StepInputs

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Sequence:
    """Tokens, and the physical blocks that hold their keys and values."""

    tokens: NDArray[np.integer[Any]]
    blocks: SequenceOf[int]


Part = tuple[Sequence, int, int]  # tokens from, to


def pack(parts: SequenceOf[Part], block_size: int = BLOCK_SIZE) -> StepInputs:
    """A step that computes `parts` and wants the logits of every token."""
    positions = [np.arange(start, end) for _, start, end in parts]
    width = max(len(sequence.blocks) for sequence, _, _ in parts)
    tables = np.zeros((len(parts), width), np.int32)
    for row, (sequence, _, _) in zip(tables, parts, strict=True):
        row[: len(sequence.blocks)] = sequence.blocks
    slots = [
        np.asarray(sequence.blocks)[at // block_size] * block_size + at % block_size
        for (sequence, _, _), at in zip(parts, positions, strict=True)
    ]
    starts = np.cumsum([0, *(len(at) for at in positions)])
    return StepInputs(
        token_ids=_int32(np.concatenate([s.tokens[start:end] for s, start, end in parts])),
        positions=_int32(np.concatenate(positions)),
        slot_mapping=_int32(np.concatenate(slots)),
        block_tables=_int32(tables),
        query_start_loc=_int32(starts),
        prefix_offsets=_int32(np.array([start for _, start, _ in parts])),
        logits_indices=_int32(np.arange(starts[-1])),
    )


def _int32(array: NDArray[Any]) -> NDArray[np.int32]:
    return np.ascontiguousarray(array, np.int32)


def run_step(executable: Executable, parts: SequenceOf[Part]) -> list[NDArray[np.float32]]:
    """The logits [end - start, V] of every part."""
    logits = executable.run(pack(parts)).logits.copy()
    ends = np.cumsum([end - start for _, start, end in parts])
    return np.split(logits, ends[:-1])
