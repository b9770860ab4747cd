"""Runs steps on a real paged cache that holds tokens and positions instead of keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from octavo.backends.base import Float32Array, StepInputs, StepOutputs
from octavo.backends.null import context_hash
from octavo.graphs import bindings
from octavo.graphs.errors import BackendError

if TYPE_CHECKING:
    from octavo.backends.manifest import Limits, Profile

_EMPTY = -1  # token and position of a slot that was never written


class NullExecutable:
    """Refuses inputs that break the graph contract, as no real backend could afford to."""

    def __init__(self, vocab_size: int, limits: Limits, profiles: tuple[Profile, ...]) -> None:
        self._vocab_size = vocab_size
        self._limits = limits
        self._profiles = profiles
        self._factors = context_hash.powers(limits.max_blocks_per_seq * limits.block_size)
        self._logits = _logits_by_distance(vocab_size)
        self._tokens: NDArray[np.int64] | None = None  # [N, block_size]
        self._positions: NDArray[np.int64] | None = None  # [N, block_size]

    def allocate_kv_cache(self, num_blocks: int) -> None:
        shape = (num_blocks, self._limits.block_size)
        self._tokens = np.full(shape, _EMPTY, dtype=np.int64)
        self._positions = np.full(shape, _EMPTY, dtype=np.int64)

    def close(self) -> None:
        self._tokens = self._positions = None

    def run(self, inputs: StepInputs) -> StepOutputs:
        if self._tokens is None or self._positions is None:
            raise BackendError("the null engine has no cache: call allocate_kv_cache first")
        counts = np.diff(inputs.query_start_loc)
        self._check_shapes(inputs, counts)
        self._check_addresses(inputs, counts, len(self._tokens))
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

    def _check_shapes(self, inputs: StepInputs, counts: NDArray[np.int32]) -> None:
        num_tokens, (num_seqs, width) = len(inputs.token_ids), inputs.block_tables.shape
        for binding in bindings.STEP_INPUTS:
            array = getattr(inputs, binding.name)
            if array.dtype != np.int32 or not array.flags.c_contiguous:
                raise BackendError(f"{binding.name} is not a contiguous int32 array")
        sizes = {
            bindings.TOKENS: num_tokens,
            bindings.SEQUENCES: num_seqs,
            bindings.SEQUENCES_PLUS_ONE: num_seqs + 1,
            bindings.BLOCKS_PER_SEQUENCE: width,
            bindings.LOGITS_ROWS: len(inputs.logits_indices),
        }
        for binding in bindings.STEP_INPUTS:
            shape = getattr(inputs, binding.name).shape
            if shape != tuple(sizes[str(dim)] for dim in binding.shape):
                raise BackendError(f"{binding.name} has shape {shape}, sizes are {sizes}")
        if not any(_admits(profile, sizes) for profile in self._profiles):
            raise BackendError(f"no profile of the engine admits a step of sizes {sizes}")
        starts = inputs.query_start_loc
        if starts[0] != 0 or starts[-1] != num_tokens or (counts < 1).any():
            raise BackendError(
                f"query_start_loc {starts.tolist()} does not divide {num_tokens} tokens"
            )
        if ((inputs.token_ids < 0) | (inputs.token_ids >= self._vocab_size)).any():
            raise BackendError(f"token_ids {inputs.token_ids.tolist()} leave the vocabulary")
        rows = inputs.logits_indices
        if (np.diff(rows) < 1).any() or ((rows < 0) | (rows >= num_tokens)).any():
            raise BackendError(
                f"logits_indices {rows.tolist()} are not ascending rows of {num_tokens}"
            )

    def _check_addresses(
        self, inputs: StepInputs, counts: NDArray[np.int32], num_blocks: int
    ) -> None:
        sequences = np.repeat(np.arange(len(counts)), counts)
        index_in_step = np.arange(len(sequences)) - inputs.query_start_loc[sequences]
        expected = inputs.prefix_offsets[sequences] + index_in_step
        if (inputs.positions != expected).any():
            raise BackendError(
                f"positions {inputs.positions.tolist()} should be {expected.tolist()}"
            )
        if inputs.positions.max() >= self._limits.max_model_len:
            raise BackendError(
                f"position {inputs.positions.max()} passes the engine's max_model_len "
                f"{self._limits.max_model_len}"
            )
        block_size = self._limits.block_size
        if inputs.positions.max() // block_size >= inputs.block_tables.shape[1]:
            raise BackendError("a block table is too short for its sequence")
        if ((inputs.block_tables < 0) | (inputs.block_tables >= num_blocks)).any():
            raise BackendError(f"block_tables name blocks outside the cache's {num_blocks}")
        blocks = inputs.block_tables[sequences, inputs.positions // block_size]
        slots = blocks * block_size + inputs.positions % block_size
        written = inputs.slot_mapping >= 0
        if (inputs.slot_mapping[written] != slots[written]).any():
            raise BackendError(
                f"slot_mapping {inputs.slot_mapping.tolist()} should be {slots.tolist()}"
            )
        if len(np.unique(slots)) != len(slots):
            raise BackendError(f"two tokens share a cache slot: {slots.tolist()}")


def _admits(profile: Profile, sizes: dict[str, int]) -> bool:
    return all(
        bounds.min <= sizes[dim] <= bounds.max
        for dim, bounds in profile.dims.items()
        if dim in sizes
    )


def _logits_by_distance(vocab_size: int) -> Float32Array:
    """[2 V] f32: the logit of the id `d` places after the best one, twice over; falls with d."""
    distance = np.arange(vocab_size, dtype=np.float32)
    logits = -0.25 * np.minimum(distance, 40.0) - 1e-3 * distance
    return np.concatenate([logits, logits])
