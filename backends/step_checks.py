"""Whether a step keeps the graph contract: shapes, sizes, positions, blocks and slots agree."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from octavo.backends.base import StepInputs
from octavo.graphs import bindings
from octavo.graphs.errors import BackendError

if TYPE_CHECKING:
    from octavo.backends.manifest import Limits, Manifest, Profile


def no_acceptance_graph() -> BackendError:
    return BackendError(
        "the engine has no acceptance graph: build it with a drafter of `build-engine "
        '--speculative`, or use acceptance="exact"'
    )


def check_step(inputs: StepInputs, manifest: Manifest, num_blocks: int) -> None:
    """Raises BackendError naming the first thing that is wrong.

    For the backends that can afford it. The others rely on the runtime for what could only give
    wrong numbers, and check themselves what would read or write outside their memory.
    """
    counts = np.diff(inputs.query_start_loc)
    _check_contents(inputs, counts, manifest.spec.vocab_size, manifest.profiles)
    _check_addresses(inputs, counts, manifest.limits, num_blocks)


def check_shapes(inputs: StepInputs) -> dict[str, int]:
    """The size of every symbolic dimension; BackendError where dtypes or shapes do not agree."""
    for binding in bindings.STEP_INPUTS:
        array = getattr(inputs, binding.name)
        if array.dtype != np.int32 or not array.flags.c_contiguous:
            raise BackendError(f"{binding.name} is not a contiguous int32 array")
    num_seqs, width = inputs.block_tables.shape
    sizes = {
        bindings.TOKENS: len(inputs.token_ids),
        bindings.SEQUENCES: num_seqs,
        bindings.SEQUENCES_PLUS_ONE: num_seqs + 1,
        bindings.BLOCKS_PER_SEQUENCE: width,
        bindings.LOGITS_ROWS: len(inputs.logits_indices),
    }
    for binding in bindings.STEP_INPUTS:
        shape = getattr(inputs, binding.name).shape
        if shape != tuple(sizes[str(dim)] for dim in binding.shape):
            raise BackendError(f"{binding.name} has shape {shape}, sizes are {sizes}")
    return sizes


def _check_contents(
    inputs: StepInputs,
    counts: NDArray[np.int32],
    vocab_size: int,
    profiles: tuple[Profile, ...],
) -> None:
    sizes = check_shapes(inputs)
    num_tokens = sizes[bindings.TOKENS]
    if not any(_admits(profile, sizes) for profile in profiles):
        raise BackendError(f"no profile of the engine admits a step of sizes {sizes}")
    starts = inputs.query_start_loc
    if starts[0] != 0 or starts[-1] != num_tokens or (counts < 1).any():
        raise BackendError(f"query_start_loc {starts.tolist()} does not divide {num_tokens} tokens")
    if ((inputs.token_ids < 0) | (inputs.token_ids >= vocab_size)).any():
        raise BackendError(f"token_ids {inputs.token_ids.tolist()} leave the vocabulary")
    rows = inputs.logits_indices
    if ((rows < 0) | (rows >= num_tokens)).any():
        raise BackendError(f"logits_indices {rows.tolist()} are not rows of {num_tokens}")


def _check_addresses(
    inputs: StepInputs, counts: NDArray[np.int32], limits: Limits, num_blocks: int
) -> None:
    sequences = np.repeat(np.arange(len(counts)), counts)
    index_in_step = np.arange(len(sequences)) - inputs.query_start_loc[sequences]
    expected = inputs.prefix_offsets[sequences] + index_in_step
    if (inputs.positions != expected).any():
        raise BackendError(f"positions {inputs.positions.tolist()} should be {expected.tolist()}")
    if inputs.positions.max() >= limits.max_model_len:
        raise BackendError(
            f"position {inputs.positions.max()} passes the engine's max_model_len "
            f"{limits.max_model_len}"
        )
    block_size = limits.block_size
    if inputs.positions.max() // block_size >= inputs.block_tables.shape[1]:
        raise BackendError("a block table is too short for its sequence")
    if ((inputs.block_tables < 0) | (inputs.block_tables >= num_blocks)).any():
        raise BackendError(f"block_tables name blocks outside the cache's {num_blocks}")
    blocks = inputs.block_tables[sequences, inputs.positions // block_size]
    slots = blocks * block_size + inputs.positions % block_size
    written = inputs.slot_mapping != -1
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
