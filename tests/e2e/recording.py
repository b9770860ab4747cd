"""An executable that remembers which logits the one under it computed for which tokens."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.backends import registry
from octavo.backends.base import Executable, Float32Array, LoadOptions, StepInputs, StepOutputs
from octavo.backends.manifest import Manifest
from octavo.runtime import LLM

# All tokens up to and including the one whose logits they are.
History = tuple[int, ...]


class RecordingExecutable:
    """Keeps every row of logits under the tokens that led to it.

    The tokens are read as the engine reads them: through block tables from the slots they were
    written to. Nothing of the runtime under test says which request a row belongs to.
    """

    def __init__(self, inner: Executable, block_size: int, every_position: bool) -> None:
        self.rows: defaultdict[History, list[Float32Array]] = defaultdict(list)
        self._inner = inner
        self._block_size = block_size
        self._every_position = every_position
        self._tokens = np.empty(0, np.int32)  # [slots]

    def allocate_kv_cache(self, num_blocks: int) -> None:
        self._tokens = np.full(num_blocks * self._block_size, -1, np.int32)
        self._inner.allocate_kv_cache(num_blocks)

    def run(self, inputs: StepInputs) -> StepOutputs:
        asked = inputs.logits_indices
        if self._every_position:
            every = np.arange(len(inputs.token_ids), dtype=np.int32)
            inputs = dataclasses.replace(inputs, logits_indices=every)
        logits = self._inner.run(inputs).logits
        self._tokens[inputs.slot_mapping] = inputs.token_ids
        for index, row in zip(inputs.logits_indices.tolist(), logits, strict=True):
            self.rows[self._history(inputs, index)].append(row.copy())
        return StepOutputs(logits[asked] if self._every_position else logits)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        blocks = self._tokens.reshape(-1, self._block_size)
        for source, destination in copies:
            blocks[destination] = blocks[source]
        self._inner.copy_blocks(copies)

    def close(self) -> None:
        self._inner.close()

    def _history(self, inputs: StepInputs, index: int) -> History:
        sequence = int(np.searchsorted(inputs.query_start_loc, index, "right")) - 1
        first = int(inputs.query_start_loc[sequence])
        length = int(inputs.prefix_offsets[sequence]) + index - first + 1
        at = np.arange(length)
        blocks = inputs.block_tables[sequence][at // self._block_size]
        tokens: list[int] = self._tokens[blocks * self._block_size + at % self._block_size].tolist()
        return tuple(tokens)


@contextmanager
def recorded_llm(
    engine: Path, *, every_position: bool = True, **options: Any
) -> Iterator[tuple[LLM, RecordingExecutable]]:
    """An LLM on the engine's own backend, and the record of what that computes."""
    made: list[RecordingExecutable] = []

    with pytest.MonkeyPatch.context() as patch:
        backend = registry.get("onnxruntime")
        load = backend.load

        def load_recording(
            bundle: Path, manifest: Manifest, load_options: LoadOptions
        ) -> RecordingExecutable:
            inner = load(bundle, manifest, load_options)
            made.append(RecordingExecutable(inner, manifest.limits.block_size, every_position))
            return made[0]

        patch.setattr(backend, "load", load_recording)
        llm = LLM(engine, **options)
    with llm:
        yield llm, made[0]


def prefixes(tokens: Iterable[int]) -> list[History]:
    """The histories of all positions of a text."""
    text = tuple(tokens)
    return [text[:end] for end in range(1, len(text) + 1)]
