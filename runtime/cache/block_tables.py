"""The block tables of all running requests, kept up to date instead of rebuilt at every step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.backends.base import Int32Array


class BlockTables:
    """One row for each running request: [max_num_seqs, max_blocks_per_seq] i32."""

    def __init__(self, max_num_seqs: int, max_blocks_per_seq: int) -> None:
        self._tables = np.zeros((max_num_seqs, max_blocks_per_seq), dtype=np.int32)
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    def take_row(self) -> int:
        return self._free_rows.pop()

    def give_row(self, row: int) -> None:
        self._free_rows.append(row)

    def write(self, row: int, start: int, block_ids: Sequence[int]) -> None:
        """Puts `block_ids` at the indices `start`, `start + 1`, ... of a row."""
        self._tables[row, start : start + len(block_ids)] = block_ids

    def gather(self, rows: Sequence[int], out: Int32Array) -> None:
        """`out` [len(rows), M]: the first M blocks of each row."""
        # Only what is needed: a step's cost must not grow with the longest possible sequence.
        width = out.shape[1]
        for index, row in enumerate(rows):
            out[index] = self._tables[row, :width]
