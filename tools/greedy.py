"""Greedy decoding of one sequence, straight on the backend protocol and without the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from octavo.backends import bundle, registry
from octavo.backends.base import Float32Array, LoadOptions, StepInputs
from octavo.backends.manifest import Manifest
from octavo.graphs.bindings import LOGITS_ROWS, TOKENS
from octavo.graphs.errors import IncompatibleEngineError, RequestError


@dataclass(frozen=True)
class Continuation:
    """What greedy decoding made of one prompt."""

    token_ids: tuple[int, ...]  # ends with an end-of-text token or at the length asked for
    logits: Float32Array  # [len(token_ids), V], those each token was chosen from


class GreedyDecoder:
    """An engine opened for one sequence at a time; use it as a context manager."""

    def __init__(self, engine: Path, num_threads: int | None = None) -> None:
        """Raises BundleError, IncompatibleEngineError or BackendError if it cannot be opened."""
        self.manifest: Manifest = bundle.read_manifest(engine)
        bundle.verify_files(engine, self.manifest.files)
        backend = registry.get(self.manifest.backend)
        compatibility = backend.check(self.manifest)
        if not compatibility.ok:
            raise IncompatibleEngineError(f"{engine} cannot run here: {compatibility.reason}")
        self._executable = backend.load(engine, self.manifest, LoadOptions(num_threads))
        self._num_blocks = self.manifest.limits.max_blocks_per_seq
        self._executable.allocate_kv_cache(self._num_blocks)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._executable.close()

    def decode(self, prompt: list[int], max_tokens: int) -> Continuation:
        """Prefills `prompt` in chunks of the engine's token budget, then decodes token by token.

        Raises RequestError if the prompt is empty or leaves no room for `max_tokens`.
        """
        self._require_room(len(prompt), max_tokens)
        rows = [self._prefill(prompt)]
        tokens = [self._best(rows[0])]
        while len(tokens) < max_tokens and tokens[-1] not in self.manifest.spec.eos_token_ids:
            rows.extend(self._step(tokens[-1:], len(prompt) + len(tokens) - 1))
            tokens.append(self._best(rows[-1]))
        return Continuation(tuple(tokens), np.stack(rows))

    def follow(self, prompt: list[int], token_ids: Sequence[int]) -> Float32Array:
        """Logits [len(token_ids), V] in the place of each of `token_ids`.

        Each follows the prompt and those before it, whatever would have been chosen there. Raises
        RequestError as `decode` does.
        """
        self._require_room(len(prompt), len(token_ids))
        rows = [self._prefill(prompt)]
        for index, token in enumerate(token_ids[:-1]):
            rows.extend(self._step([token], len(prompt) + index))
        return np.stack(rows)

    def predict(self, prompt: list[int], token_ids: Sequence[int]) -> list[int]:
        """The token that greedy decoding would choose in the place of each of `token_ids`."""
        return [self._best(row) for row in self.follow(prompt, token_ids)]

    @property
    def max_rows(self) -> int:
        """Tokens that `read` takes at once: what some profile has as many rows of logits for."""
        shapes = [profile.dims for profile in self.manifest.profiles]
        return max(min(dims[TOKENS].max, dims[LOGITS_ROWS].max) for dims in shapes)

    def read(self, token_ids: list[int], num_computed: int) -> Float32Array:
        """Feeds tokens at the positions from `num_computed` on; logits [len(token_ids), V] of all.

        What precedes them has been fed before.
        """
        return self._step(token_ids, num_computed, num_rows=len(token_ids))

    def _require_room(self, num_prompt_tokens: int, num_tokens: int) -> None:
        most = self.manifest.limits.max_model_len
        if not num_prompt_tokens:
            raise RequestError("the prompt has no tokens: give at least one")
        if num_prompt_tokens + num_tokens > most:
            raise RequestError(
                f"a prompt of {num_prompt_tokens} tokens and {num_tokens} to generate exceed the "
                f"engine's max_model_len of {most}: shorten one of them"
            )

    def _prefill(self, prompt: list[int]) -> Float32Array:
        """Logits [V] of the prompt's last position."""
        budget = self.manifest.limits.max_num_batched_tokens
        for start in range(0, len(prompt), budget):
            rows = self._step(prompt[start : start + budget], start)
        last: Float32Array = rows[-1]
        return last

    def _step(self, token_ids: list[int], num_computed: int, num_rows: int = 1) -> Float32Array:
        """Feeds tokens at the positions from `num_computed` on; logits [num_rows, V] of the last.

        The rows are a copy.
        """
        count = len(token_ids)
        positions = np.arange(num_computed, num_computed + count, dtype=np.int32)
        outputs = self._executable.run(
            StepInputs(
                token_ids=np.array(token_ids, np.int32),
                positions=positions,
                slot_mapping=positions,  # block i of the pool is block i of the sequence
                block_tables=np.arange(self._num_blocks, dtype=np.int32)[None],
                query_start_loc=np.array([0, count], np.int32),
                prefix_offsets=np.array([num_computed], np.int32),
                logits_indices=np.arange(count - num_rows, count, dtype=np.int32),
            )
        )
        rows: Float32Array = outputs.logits.copy()
        return rows

    def _best(self, logits: Float32Array) -> int:
        return int(logits[: self.manifest.spec.sampled_vocab_size].argmax())
