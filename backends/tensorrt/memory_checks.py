"""What would make a kernel read or write outside its memory, found before it is sent to a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from octavo.backends.base import Int32Array, StepInputs
from octavo.graphs.errors import BackendError

if TYPE_CHECKING:
    from octavo.backends.manifest import Manifest


def check_memory(inputs: StepInputs, manifest: Manifest, num_blocks: int) -> None:
    """Raises BackendError naming the first input that has a value outside its range."""
    limits, num_tokens = manifest.limits, len(inputs.token_ids)
    block_size, width = limits.block_size, inputs.block_tables.shape[1]
    _check("token_ids", inputs.token_ids, 0, manifest.spec.vocab_size)
    _check("positions", inputs.positions, 0, limits.max_model_len)
    _check("slot_mapping", inputs.slot_mapping, -1, num_blocks * block_size)
    _check("block_tables", inputs.block_tables, 0, num_blocks)
    _check("logits_indices", inputs.logits_indices, 0, num_tokens)
    starts = inputs.query_start_loc
    counts = np.diff(starts)
    if starts[0] != 0 or starts[-1] != num_tokens or (counts < 0).any():
        raise BackendError(f"query_start_loc {starts.tolist()} does not divide {num_tokens} tokens")
    _check("prefix_offsets", inputs.prefix_offsets, 0, width * block_size + 1)
    totals = inputs.prefix_offsets + counts
    if (totals > width * block_size).any():
        raise BackendError(
            f"a sequence of {int(totals.max())} tokens does not fit into a block table of {width} "
            f"blocks of {block_size}"
        )


def _check(name: str, values: Int32Array, low: int, end: int) -> None:
    if values.size and (int(values.min()) < low or int(values.max()) >= end):
        raise BackendError(
            f"{name} has values from {int(values.min())} to {int(values.max())}, "
            f"they must be from {low} to {end - 1}"
        )
