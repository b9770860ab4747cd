"""Packs a plan into the flattened arrays of one step: no batch dimension, no padding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from octavo.backends.base import StepInputs
from octavo.runtime import positions
from octavo.runtime.block_tables import BlockTables
from octavo.runtime.capacity import EngineLimits
from octavo.runtime.scheduler import StepPlan


@dataclass(frozen=True, slots=True)
class PackedStep:
    inputs: StepInputs
    # [B]: how many rows of the logits, in order, are each sequence's; 0 for a chunk of a prefill.
    logits_rows: list[int]


class BatchPacker:
    """Owns the input arrays; a packed step is valid until the next one is packed."""

    def __init__(self, limits: EngineLimits) -> None:
        num_tokens, num_seqs = limits.max_num_batched_tokens, limits.max_num_seqs
        self._block_size = limits.block_size
        self._token_ids = np.empty(num_tokens, dtype=np.int32)  # [T]
        self._positions = np.empty(num_tokens, dtype=np.int32)  # [T]
        self._slot_mapping = np.empty(num_tokens, dtype=np.int32)  # [T]
        self._query_start_loc = np.empty(num_seqs + 1, dtype=np.int32)  # [B+1]

    def pack(self, plan: StepPlan, block_tables: BlockTables) -> PackedStep:
        """Lays the plan's sequences end to end, in the plan's order."""
        tokens, counts, starts, rows, logits_rows = [], [], [], [], []
        logits_indices: list[int] = []
        width = end = 0
        for request, count, _, _ in plan.scheduled:
            start = request.num_computed_tokens
            tokens.append(request.tokens(start, start + count))
            end += count
            wanted = positions.logits_rows(request.num_tokens, start, count)
            logits_indices.extend(range(end - wanted, end))
            logits_rows.append(wanted)
            counts.append(count)
            starts.append(start)
            rows.append(request.table_row)
            width = max(width, len(request.block_ids))

        token_ids = np.concatenate(tokens, out=self._token_ids[:end])
        lengths = np.array(counts, dtype=np.int32)
        prefix_offsets = np.array(starts, dtype=np.int32)
        tables = block_tables.gather(rows, width)
        query_start_loc = self._query_start_loc[: len(counts) + 1]
        positions.fill_query_start_loc(lengths, query_start_loc)
        token_positions = self._positions[:end]
        positions.fill_positions(prefix_offsets, query_start_loc, lengths, token_positions)
        slot_mapping = self._slot_mapping[:end]
        positions.fill_slots(tables, token_positions, lengths, self._block_size, slot_mapping)
        inputs = StepInputs(
            token_ids=token_ids,
            positions=token_positions,
            slot_mapping=slot_mapping,
            block_tables=tables,
            query_start_loc=query_start_loc,
            prefix_offsets=prefix_offsets,
            logits_indices=np.array(logits_indices, dtype=np.int32),
        )
        return PackedStep(inputs, logits_rows)
