"""Runs steps on a real paged cache that holds tokens and positions instead of keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from octavo.backends.base import (
    AcceptInputs,
    Float32Array,
    Int32Array,
    StepInputs,
    StepOutputs,
)
from octavo.backends.null import context_hash
from octavo.backends.step_checks import check_step, no_acceptance_graph
from octavo.graphs.errors import BackendError

if TYPE_CHECKING:
    from octavo.backends.manifest import Manifest

_EMPTY = -1  # token and position of a slot that was never written


class NullExecutable:
    """Refuses inputs that break the graph contract, as no real backend could afford to."""

    def __init__(self, manifest: Manifest) -> None:
        vocab_size, limits = manifest.spec.vocab_size, manifest.limits
        self._manifest = manifest
        self._vocab_size = vocab_size
        self._factors = context_hash.powers(limits.max_blocks_per_seq * limits.block_size)
        self._logits = _logits_by_distance(vocab_size)
        self._tokens: NDArray[np.int64] | None = None  # [N, block_size]
        self._positions: NDArray[np.int64] | None = None  # [N, block_size]

    def allocate_kv_cache(self, num_blocks: int) -> None:
        shape = (num_blocks, self._manifest.limits.block_size)
        self._tokens = np.full(shape, _EMPTY, dtype=np.int64)
        self._positions = np.full(shape, _EMPTY, dtype=np.int64)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        if self._tokens is None or self._positions is None:
            raise BackendError("the null engine has no cache: call allocate_kv_cache first")
        for source, destination in copies:
            self._tokens[destination] = self._tokens[source]
            self._positions[destination] = self._positions[source]

    def accept(self, inputs: AcceptInputs) -> Int32Array:
        raise no_acceptance_graph()

    def close(self) -> None:
        self._tokens = self._positions = None

    def run(self, inputs: StepInputs) -> StepOutputs:
        if self._tokens is None or self._positions is None:
            raise BackendError("the null engine has no cache: call allocate_kv_cache first")
        check_step(inputs, self._manifest, len(self._tokens))
        if (np.diff(inputs.logits_indices) < 1).any():
            raise BackendError(f"logits_indices {inputs.logits_indices.tolist()} do not ascend")
        counts = np.diff(inputs.query_start_loc)
        written = inputs.slot_mapping >= 0
        self._tokens.reshape(-1)[inputs.slot_mapping[written]] = inputs.token_ids[written]
        self._positions.reshape(-1)[inputs.slot_mapping[written]] = inputs.positions[written]
        following = self._read(inputs, counts, self._tokens, self._positions)
        return StepOutputs(self._rows_of_logits(following[inputs.logits_indices]))

    def _read(
        self,
        inputs: StepInputs,
        counts: NDArray[np.int32],
        cached_tokens: NDArray[np.int64],
        cached_positions: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """[T]: the token after each of the step's; contexts are read from the cache alone."""
        num_seqs = len(counts)
        tokens = cached_tokens[inputs.block_tables].reshape(num_seqs, -1)  # [B, M * block_size]
        positions = cached_positions[inputs.block_tables].reshape(num_seqs, -1)
        expected = np.arange(tokens.shape[1])
        lengths = inputs.prefix_offsets + counts
        wrong = (positions != expected) & (expected < lengths[:, None])
        if wrong.any():
            sequence, position = np.argwhere(wrong)[0]
            raise BackendError(
                f"sequence {sequence} finds position {positions[sequence, position]} in the cache "
                f"where its position {position} should be"
            )
        sequences = np.repeat(np.arange(num_seqs), counts)
        if (tokens[sequences, inputs.positions] != inputs.token_ids).any():
            raise BackendError("the cache holds other tokens than the step's at their positions")
        factors = self._factors[: tokens.shape[1]]
        following = context_hash.next_tokens(tokens, factors, self._vocab_size)
        return following[sequences, inputs.positions]

    def _rows_of_logits(self, best: NDArray[np.int64]) -> Float32Array:
        """[L, V] f32: highest at the best token, falling with each id after it, around the end."""
        logits = np.empty((len(best), self._vocab_size), dtype=np.float32)
        for row, token in zip(logits, best.tolist(), strict=True):
            start = self._vocab_size - token
            row[:] = self._logits[start : start + self._vocab_size]
        return logits


def _logits_by_distance(vocab_size: int) -> Float32Array:
    """[2 V] f32: the logit of the id `d` places after the best one, twice over; falls with d."""
    distance = np.arange(vocab_size, dtype=np.float32)
    logits = -0.25 * np.minimum(distance, 40.0) - 1e-3 * distance
    return np.concatenate([logits, logits])
