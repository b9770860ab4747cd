"""Engines on the null backend, without a bundle, for tests of the runtime's inner parts."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from octavo.backends.base import StepInputs, StepOutputs
from octavo.backends.manifest import Limits
from octavo.backends.null import expected_next_token
from octavo.backends.null.bundle import make_manifest
from octavo.backends.null.executable import NullExecutable
from octavo.runtime import invariants
from octavo.runtime.capacity import EngineLimits
from octavo.runtime.engine import Engine
from octavo.runtime.request import Request
from octavo.runtime.sampling.sampling_params import SamplingParams
from octavo.runtime.step_budget import SchedulingOptions

VOCAB_SIZE = 97
INPUT_NAMES = tuple(field.name for field in dataclasses.fields(StepInputs))


class RecordingExecutable(NullExecutable):
    """Keeps a copy of every step's inputs; `on_run` may raise, after the cache was written.

    `copies` holds the (source, destination) blocks of every step that copied any.
    """

    def __init__(self, limits: Limits, vocab_size: int = VOCAB_SIZE) -> None:
        super().__init__(make_manifest(vocab_size=vocab_size, limits=limits))
        self.steps: list[StepInputs] = []
        self.copies: list[list[tuple[int, int]]] = []
        self.on_run: Callable[[], None] | None = None

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        self.copies.append(list(copies))
        super().copy_blocks(copies)

    def run(self, inputs: StepInputs) -> StepOutputs:
        copies = {name: copy.copy(getattr(inputs, name)) for name in INPUT_NAMES}
        self.steps.append(StepInputs(**copies))
        outputs = super().run(inputs)
        if self.on_run is not None:
            self.on_run()
        return outputs


class Harness:
    """An engine whose invariants are checked after every step, and the executable under it."""

    def __init__(
        self,
        *,
        num_kv_blocks: int = 64,
        block_size: int = 16,
        max_model_len: int = 256,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 128,
        enable_prefix_caching: bool = True,
        scheduling: SchedulingOptions | None = None,
    ) -> None:
        limits = Limits(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
        )
        self.executable = RecordingExecutable(limits)
        self.engine = Engine(
            self.executable,
            EngineLimits(**limits.model_dump(), num_kv_blocks=num_kv_blocks),
            sampled_vocab_size=VOCAB_SIZE,
            enable_prefix_caching=enable_prefix_caching,
            scheduling=scheduling,
        )
        self._num_requests = 0

    @property
    def steps(self) -> list[StepInputs]:
        return self.executable.steps

    @property
    def copies(self) -> list[list[tuple[int, int]]]:
        return self.executable.copies

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int | None = 8,
        *,
        eos_token_ids: Sequence[int] = (),
        salt: bytes = b"",
        priority: int = 0,
        **params: object,
    ) -> Request:
        """Queues a greedy request, unless `params` says otherwise; with n > 1, its first sequence.

        The others are its `followers`.
        """
        sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, **params})  # type: ignore[arg-type]
        name = str(self._num_requests)
        request, *followers = (
            Request(
                f"{name}/{choice}" if choice else name,
                prompt,
                sampling,
                max_model_len=self.engine.limits.max_model_len,
                eos_token_ids=eos_token_ids,
                seed=sampling.seed or 0,
                choice=choice,
                priority=priority,
                cache_salt=salt,
            )
            for choice in range(sampling.num_sequences)
        )
        request.followers = tuple(followers)
        self._num_requests += 1
        self.engine.add_request(request)
        return request

    def step(self) -> list[Request]:
        progressed = self.engine.step()
        self.check()
        return progressed

    def check(self) -> None:
        invariants.check(invariants.snapshot(self.engine.scheduler))

    def run(self) -> None:
        """Steps until every request has finished, then checks that no block is in use."""
        while self.engine.has_unfinished_requests:
            self.step()
        assert self.engine.pool.num_available == self.engine.pool.num_blocks


def random_tokens(count: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, VOCAB_SIZE, count).tolist()
    return tokens


def alone(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The greedy continuation of a prompt, by the null backend's arithmetic alone."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(expected_next_token(tokens, VOCAB_SIZE))
    return tokens[len(prompt) :]
