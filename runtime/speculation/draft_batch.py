"""Packs what a drafter computes into the flattened arrays of one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from octavo.backends.base import Float32Array, Int32Array, StepInputs
from octavo.runtime import positions


class DraftRun(NamedTuple):
    """Consecutive tokens of one sequence.

    block_ids     that hold its positions up to the last of these tokens, at least
    start         position of the first token
    wants_logits  of the last token
    """

    block_ids: Sequence[int] | Int32Array
    start: int
    tokens: Int32Array
    wants_logits: bool


def pack_runs(
    runs: Sequence[DraftRun], block_size: int, features: Float32Array | None = None
) -> StepInputs:
    """One sequence for each run, in order; `features` [T, F] for all of their tokens."""
    counts = np.array([len(run.tokens) for run in runs], dtype=np.int32)
    starts = np.array([run.start for run in runs], dtype=np.int32)
    query_start_loc = np.empty(len(runs) + 1, dtype=np.int32)
    positions.fill_query_start_loc(counts, query_start_loc)
    token_positions = np.empty(query_start_loc[-1], dtype=np.int32)
    positions.fill_positions(starts, query_start_loc, counts, token_positions)
    block_tables = _tables(runs)
    slot_mapping = np.empty_like(token_positions)
    positions.fill_slots(block_tables, token_positions, counts, block_size, slot_mapping)
    wanted = np.array([run.wants_logits for run in runs], dtype=bool)
    return StepInputs(
        token_ids=np.concatenate([run.tokens for run in runs]),
        positions=token_positions,
        slot_mapping=slot_mapping,
        block_tables=block_tables,
        query_start_loc=query_start_loc,
        prefix_offsets=starts,
        logits_indices=query_start_loc[1:][wanted] - 1,
        features=features,
    )


def _tables(runs: Sequence[DraftRun]) -> Int32Array:
    """[B, M]; what lies behind a shorter sequence's blocks is never read."""
    width = max(len(run.block_ids) for run in runs)
    tables = np.zeros((len(runs), width), dtype=np.int32)
    for row, run in zip(tables, runs, strict=True):
        row[: len(run.block_ids)] = run.block_ids
    return tables
