"""Packs a plan into the flattened arrays of one step: no batch dimension, no padding."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from octavo.backends.base import Int32Array, StepInputs
from octavo.runtime import positions
from octavo.runtime.cache.block_tables import BlockTables
from octavo.runtime.capacity import EngineLimits
from octavo.runtime.scheduler import StepPlan


@dataclass(frozen=True, slots=True)
class PackedStep:
    inputs: StepInputs
    # [B]: how many rows of the logits, in order, are each sequence's; 0 for a chunk of a prefill.
    logits_rows: list[int]


class BatchPacker:
    """Owns the input arrays; a packed step is valid until the next one is packed.

    Each array begins at the same address in every step, and decode steps of equal shapes are one
    object with new contents: an executable has nothing to bind then.
    """

    def __init__(self, limits: EngineLimits) -> None:
        num_tokens, num_seqs = limits.max_num_batched_tokens, limits.max_num_seqs
        self._block_size = limits.block_size
        self._token_ids = np.empty(num_tokens, dtype=np.int32)  # [T]
        self._positions = np.empty(num_tokens, dtype=np.int32)  # [T]
        self._slot_mapping = np.empty(num_tokens, dtype=np.int32)  # [T]
        self._logits_indices = np.empty(num_tokens, dtype=np.int32)  # [L]
        self._query_start_loc = np.empty(num_seqs + 1, dtype=np.int32)  # [B+1]
        self._prefix_offsets = np.empty(num_seqs, dtype=np.int32)  # [B]
        self._block_tables = np.empty(num_seqs * limits.max_blocks_per_seq, dtype=np.int32)  # [B M]
        self._counting = np.arange(num_seqs + 1, dtype=np.int32)
        self._decode_inputs: StepInputs | None = None

    def pack(self, plan: StepPlan, block_tables: BlockTables) -> PackedStep:
        """Lays the plan's sequences end to end, in the plan's order."""
        num_seqs = len(plan.scheduled)
        rows = [entry.request.table_row for entry in plan.scheduled]
        width = max(len(entry.request.block_ids) for entry in plan.scheduled)
        inputs = self._decode_inputs
        if inputs is None or inputs.block_tables.shape != (num_seqs, width):
            inputs = self._decode_inputs = self._single_tokens(num_seqs, width)
        block_tables.gather(rows, inputs.block_tables)
        inputs.prefix_offsets[:] = [entry.request.num_computed_tokens for entry in plan.scheduled]
        if plan.num_tokens == num_seqs:
            return self._pack_single_tokens(plan, inputs)
        return self._pack_runs(plan, inputs.block_tables, inputs.prefix_offsets)

    def _pack_runs(
        self, plan: StepPlan, tables: Int32Array, prefix_offsets: Int32Array
    ) -> PackedStep:
        tokens, counts, logits_rows = [], [], []
        logits_indices: list[int] = []
        end = 0
        for request, count, _, _ in plan.scheduled:
            start = request.num_computed_tokens
            tokens.append(request.tokens(start, start + count))
            end += count
            wanted = positions.logits_rows(request.first_logits_position, start, count)
            logits_indices.extend(range(end - wanted, end))
            logits_rows.append(wanted)
            counts.append(count)
        lengths = np.array(counts, dtype=np.int32)
        query_start_loc = self._query_start_loc[: len(counts) + 1]
        positions.fill_query_start_loc(lengths, query_start_loc)
        token_positions = self._positions[:end]
        positions.fill_positions(prefix_offsets, query_start_loc, lengths, token_positions)
        slot_mapping = self._slot_mapping[:end]
        positions.fill_slots(tables, token_positions, lengths, self._block_size, slot_mapping)
        rows = self._logits_indices[: len(logits_indices)]
        rows[:] = logits_indices
        inputs = StepInputs(
            token_ids=np.concatenate(tokens, out=self._token_ids[:end]),
            positions=token_positions,
            slot_mapping=slot_mapping,
            block_tables=tables,
            query_start_loc=query_start_loc,
            prefix_offsets=prefix_offsets,
            logits_indices=rows,
        )
        return PackedStep(inputs, logits_rows)

    def _single_tokens(self, num_seqs: int, width: int) -> StepInputs:
        """Views for one token a sequence, as nearly every step has: most of it is known."""
        prefix_offsets = self._prefix_offsets[:num_seqs]
        return StepInputs(
            token_ids=self._token_ids[:num_seqs],
            positions=prefix_offsets,
            slot_mapping=self._slot_mapping[:num_seqs],
            block_tables=self._block_tables[: num_seqs * width].reshape(num_seqs, width),
            query_start_loc=self._counting[: num_seqs + 1],
            prefix_offsets=prefix_offsets,
            logits_indices=self._counting[:num_seqs],
        )

    def _pack_single_tokens(self, plan: StepPlan, inputs: StepInputs) -> PackedStep:
        token_ids, slots, logits_rows = [], [], []
        for request, _, _, _ in plan.scheduled:
            position = request.num_computed_tokens
            token_ids.append(request.token(position))
            slots.append(positions.slot_of(request.block_ids, position, self._block_size))
            logits_rows.append(positions.logits_rows(request.first_logits_position, position, 1))
        inputs.token_ids[:] = token_ids
        inputs.slot_mapping[:] = slots
        if 0 in logits_rows:  # the budget left a prompt only one token
            wanted = inputs.logits_indices[np.array(logits_rows, dtype=bool)]
            inputs = replace(inputs, logits_indices=wanted)
        return PackedStep(inputs, logits_rows)
