"""Drafters with a cache of their own, on executables that refuse a cache with other contents."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from octavo.backends.base import AcceptInputs, Int32Array, StepInputs, StepOutputs
from octavo.runtime.capacity import EngineLimits
from octavo.runtime.request import Request
from octavo.runtime.speculation.draft_controller import DraftController
from octavo.runtime.speculation.draft_sampler import DraftSampler
from octavo.runtime.speculation.drafter import Drafter
from octavo.runtime.speculation.paged_drafter import DraftModelDrafter, FeatureDrafter
from octavo.runtime.speculation.speculator import Speculator
from tests.unit.runtime_harness import (
    VOCAB_SIZE,
    Harness,
    RecordingExecutable,
    alone,
    random_tokens,
)

NUM_DRAFTS = 4


def executable_of(limits: EngineLimits) -> RecordingExecutable:
    """Another null model: its cache must hold exactly the tokens before those of a step."""
    values = dataclasses.asdict(limits)
    del values["num_kv_blocks"]
    from octavo.backends.manifest import Limits

    return RecordingExecutable(Limits(**values))


def speculate(harness: Harness, drafter: Drafter, *, adaptive: bool = False) -> Speculator:
    controller = DraftController({drafter.method: NUM_DRAFTS}, adaptive=adaptive)
    speculator = Speculator([drafter], controller, harness.engine.limits)
    harness.engine.speculator = speculator
    return speculator


def with_draft_model(harness: Harness) -> tuple[Speculator, RecordingExecutable]:
    """The draft model is the target itself: every draft is right while its cache is."""
    executable = executable_of(harness.engine.limits)
    sampler = DraftSampler(VOCAB_SIZE)
    drafter = DraftModelDrafter(executable, harness.engine.limits, sampler, NUM_DRAFTS)
    return speculate(harness, drafter), executable


def check_outputs(requests: Sequence[Request]) -> None:
    for request in requests:
        prompt = request.prompt_token_ids
        assert request.output_token_ids == alone(prompt, request.num_output_tokens)


def assert_all_accepted(speculator: Speculator) -> None:
    counts = speculator.counts
    assert counts.num_failures == 0
    assert counts.num_draft_tokens > 0
    assert counts.num_accepted_tokens == counts.num_draft_tokens


def test_a_perfect_draft_model_is_always_accepted() -> None:
    harness = Harness()
    speculator, executable = with_draft_model(harness)
    request = harness.add(random_tokens(21), max_tokens=11)
    harness.run()
    check_outputs([request])
    assert_all_accepted(speculator)
    # The prompt and its first token, then chains; each verification step gives five tokens.
    assert [len(step.token_ids) for step in harness.steps] == [21, 5, 5]
    assert [len(step.token_ids) for step in executable.steps] == [22, 1, 1, 1, 6, 1, 1, 1]
    assert speculator.counts.accepted_per_position == [2, 2, 2, 2]


@pytest.mark.parametrize("num_kv_blocks", [64, 14])
def test_batches_chunks_and_preemption_leave_the_draft_model_right(num_kv_blocks: int) -> None:
    harness = Harness(num_kv_blocks=num_kv_blocks, max_num_batched_tokens=48)
    speculator, _ = with_draft_model(harness)
    requests = [
        harness.add(random_tokens(length, seed=length), max_tokens=70) for length in (70, 3, 16, 31)
    ]
    harness.run()
    check_outputs(requests)
    assert_all_accepted(speculator)
    assert (harness.engine.scheduler.num_preemptions > 0) == (num_kv_blocks == 14)


def test_prefix_hits_and_forks_leave_the_draft_model_right() -> None:
    """Blocks that the engine found are computed by the draft model once, and shared ones once."""
    harness = Harness(max_num_batched_tokens=64)
    speculator, _ = with_draft_model(harness)
    prompt = random_tokens(40)
    first = harness.add(prompt, max_tokens=8)
    harness.run()
    together = [harness.add([*prompt, token], max_tokens=8) for token in (1, 2, 3)]
    sampled = harness.add(prompt, max_tokens=8, n=3, temperature=0.8, seed=5)
    harness.run()
    check_outputs([first, *together])
    assert all((request.num_cached_tokens or 0) >= 32 for request in together)
    assert sampled.num_output_tokens == 8
    assert speculator.counts.num_failures == 0


def test_a_draft_model_catches_up_with_what_it_has_not_seen() -> None:
    """It computes nothing for a sequence that may not draft, and all of it when one may."""
    harness = Harness(max_num_batched_tokens=32)
    speculator, executable = with_draft_model(harness)
    prompt = random_tokens(60)
    harness.add(prompt, max_tokens=4, speculate=False)
    harness.run()
    assert executable.steps == []
    request = harness.add(prompt, max_tokens=10)
    harness.run()
    check_outputs([request])
    assert_all_accepted(speculator)
    assert [len(step.token_ids) for step in executable.steps[:3]] == [32, 29, 1]


class LastToken(RecordingExecutable):
    """The token after t is (7 t + 3) mod V whatever comes before; hidden state [T, 1]: t itself."""

    def run(self, inputs: StepInputs) -> StepOutputs:
        super().run(inputs)
        rows = inputs.token_ids[inputs.logits_indices]
        logits = np.zeros((len(rows), VOCAB_SIZE), dtype=np.float32)
        logits[np.arange(len(rows)), (7 * rows + 3) % VOCAB_SIZE] = 1.0
        return StepOutputs(logits, inputs.token_ids[:, None].astype(np.float32))


class ShiftedExecutable:
    """A feature drafter of `LastToken`. Its cache holds (token, feature) of every position.

    A position's feature has to be the token of the position before it, of the target or its own.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.steps: list[StepInputs] = []

    def allocate_kv_cache(self, num_blocks: int) -> None:
        self._cache = np.full((num_blocks * self._block_size, 2), -1.0)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        blocks = self._cache.reshape(-1, self._block_size, 2)
        for source, destination in copies:
            blocks[destination] = blocks[source]

    def run(self, inputs: StepInputs) -> StepOutputs:
        assert inputs.features is not None
        self.steps.append(inputs)
        self._cache[inputs.slot_mapping, 0] = inputs.token_ids
        self._cache[inputs.slot_mapping, 1] = inputs.features[:, 0]
        counts = np.diff(inputs.query_start_loc)
        for table, start, count in zip(
            inputs.block_tables, inputs.prefix_offsets, counts, strict=True
        ):
            slots = (table[:, None] * self._block_size + np.arange(self._block_size)).reshape(-1)
            tokens, features = self._cache[slots[: start + count]].T
            assert (features[1:] == tokens[:-1]).all()
        rows = inputs.token_ids[inputs.logits_indices]
        logits = np.zeros((len(rows), VOCAB_SIZE), dtype=np.float32)
        logits[np.arange(len(rows)), (7 * rows + 3) % VOCAB_SIZE] = 1.0
        return StepOutputs(logits, rows[:, None].astype(np.float32))

    def accept(self, inputs: AcceptInputs) -> Int32Array:
        raise AssertionError("drafters accept nothing")

    def close(self) -> None:
        pass


def with_features(harness: Harness) -> tuple[Speculator, ShiftedExecutable]:
    limits = harness.engine.limits
    harness.engine._executable = LastToken(harness.executable._manifest.limits)
    harness.engine._executable.allocate_kv_cache(limits.num_kv_blocks)
    executable = ShiftedExecutable(limits.block_size)
    drafter = FeatureDrafter("eagle", executable, limits, DraftSampler(VOCAB_SIZE), NUM_DRAFTS)
    return speculate(harness, drafter), executable


def continued(prompt: Sequence[int], count: int) -> list[int]:
    tokens = [prompt[-1]]
    for _ in range(count):
        tokens.append((7 * tokens[-1] + 3) % VOCAB_SIZE)
    return tokens[1:]


def test_a_feature_drafter_reads_the_next_token_beside_the_hidden_state() -> None:
    harness = Harness()
    speculator, executable = with_features(harness)
    prompt = random_tokens(21)
    request = harness.add(prompt, max_tokens=11)
    harness.run()
    assert request.output_token_ids == continued(prompt, 11)
    assert_all_accepted(speculator)
    # 21 entries of the prompt with its first output token last, then one a draft.
    assert [len(step.token_ids) for step in executable.steps][:5] == [21, 1, 1, 1, 5]
    assert executable.steps[0].token_ids.tolist() == [*prompt[1:], request.output_token_ids[0]]
    assert executable.steps[1].positions.tolist() == [21]


def test_a_feature_drafter_keeps_up_with_chunks_batches_and_finished_requests() -> None:
    harness = Harness(max_num_batched_tokens=40, num_kv_blocks=16)
    speculator, _ = with_features(harness)
    prompts = [random_tokens(length, seed=length) for length in (70, 3, 16, 31)]
    requests = [harness.add(prompt, max_tokens=20) for prompt in prompts]
    harness.run()
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.output_token_ids == continued(prompt, 20)
    again = harness.add([*prompts[3], *requests[3].output_token_ids, 5], max_tokens=9)
    harness.run()
    assert again.num_cached_tokens
    assert again.output_token_ids == continued([5], 9)
    assert_all_accepted(speculator)
