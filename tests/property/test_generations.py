"""Whole requests of users: each gets what it gets alone, whatever else the engine goes through."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.backends.base import StepInputs, StepOutputs
from octavo.backends.manifest import Limits
from octavo.backends.null.bundle import make_manifest
from octavo.backends.null.executable import NullExecutable
from octavo.graphs.errors import BackendError, CapacityError, QueueFullError, RequestError
from octavo.runtime import invariants
from octavo.runtime.llm_engine import EngineOptions, LLMEngine
from octavo.runtime.request import Request
from octavo.runtime.sampling.sampling_params import SamplingParams
from octavo.runtime.speculation.draft_sampler import DraftSampler
from octavo.runtime.speculation.ngram import NgramDrafter
from octavo.runtime.speculation.paged_drafter import DraftModelDrafter
from tests.property.user_requests import (
    BLOCK_SIZES,
    EOS_TOKEN_IDS,
    MOST_SEQUENCES,
    UserRequest,
    check_outputs,
    limits,
    outcome_alone,
    propose,
    request_lists,
)
from tests.unit.drafters import FailingDrafter, speculate
from tests.unit.runtime_bundles import VOCAB_SIZE, write_text_engine
from tests.unit.runtime_harness import random_tokens

if TYPE_CHECKING:
    from octavo.runtime.cache.prefix_cache import PinnedPrefix

# When the executable raises: before or after it has done what it was asked to.
Failure = Literal["before", "after"]
FAILURES: tuple[Failure, ...] = ("before", "after")
EVENTS = ("pin", "release", "reset")
DRAFTING = ("told", "told", "ngram", "draft model", "failing")


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Engines that read and write text, by their block size."""
    folder = tmp_path_factory.mktemp("bundles")
    return {
        size: write_text_engine(
            folder / str(size), limits=limits(size), eos_token_ids=EOS_TOKEN_IDS
        )
        for size in BLOCK_SIZES
    }


@pytest.fixture(scope="module")
def roomy(bundles: dict[int, Path]) -> Iterator[LLMEngine]:
    """An engine for one request at a time: with room for all of it and without a prefix cache."""
    engine = LLMEngine(bundles[16], enable_prefix_caching=False)
    yield engine
    engine.close()


@st.composite
def options(draw: st.DrawFn) -> EngineOptions:
    return {
        "max_num_seqs": draw(st.sampled_from([4, 1, 2, 3, 4, 5, MOST_SEQUENCES])),
        "max_num_batched_tokens": draw(st.sampled_from([1, 2, 3, 5, 8, 16, 40])),
        "enable_prefix_caching": draw(st.booleans()),
        "eviction_policy": draw(st.sampled_from(["lru", "lhd"])),
        "scheduling_policy": draw(st.sampled_from(["fcfs", "priority"])),
        "max_num_waiting": draw(st.sampled_from([None, None, 1, 2])),
        "max_num_partial_prefills": draw(st.integers(1, 3)),
        "max_prefill_tokens_beside_decodes": draw(st.sampled_from([None, None, 1, 4])),
    }


def failures(last: int) -> st.SearchStrategy[dict[int, Failure]]:
    return st.dictionaries(st.integers(0, last), st.sampled_from(FAILURES), max_size=3)


@contextmanager
def failing(failure: Failure | None) -> Iterator[None]:
    if failure == "before":
        raise BackendError("this step fails")
    yield
    if failure == "after":
        raise BackendError("this step fails")


@dataclass
class Stage:
    """An engine, and what happens to it beside its requests."""

    engine: LLMEngine
    events: dict[int, str]  # one of EVENTS, by the step's number
    failing_runs: dict[int, Failure]  # by how many times the executable ran
    failing_copies: dict[int, Failure]  # by how many times it copied
    failing_runs_with_copies: dict[int, Failure]  # the same; they fail when the copies are made
    step: int = 0
    num_runs: int = 0
    num_copies: int = 0
    pin: PinnedPrefix | None = None

    def __post_init__(self) -> None:
        executable: Any = self.engine.engine._executable
        run, copy_blocks = executable.run, executable.copy_blocks
        has_copied = False

        def failing_run(inputs: StepInputs) -> StepOutputs:
            nonlocal has_copied
            failure = self.failing_runs.get(self.num_runs)
            if has_copied:
                failure = failure or self.failing_runs_with_copies.get(self.num_copies)
            has_copied = False
            self.num_runs += 1
            with failing(failure):
                outputs: StepOutputs = run(inputs)
            return outputs

        def failing_copy(copies: Sequence[tuple[int, int]]) -> None:
            nonlocal has_copied
            has_copied = True
            failure = self.failing_copies.get(self.num_copies)
            self.num_copies += 1
            with failing(failure):
                copy_blocks(copies)

        executable.run, executable.copy_blocks = failing_run, failing_copy

    @property
    def obeys_priorities(self) -> bool:
        return self.engine.engine.scheduler.options.policy == "priority"

    def check(self) -> None:
        invariants.check(invariants.snapshot(self.engine.engine.scheduler))

    def add(self, request: UserRequest) -> bool:
        """Whether the request was taken; if not it is to come again."""
        priority = request.priority if self.obeys_priorities else 0
        try:
            self.engine.add_request(
                request.request_id, request.as_prompt, request.params, priority=priority
            )
        except QueueFullError:
            return False
        except CapacityError:
            assert self.pin is not None, "the pool has room for every request"
            self.release()
            return False
        return True

    def abort(self, requests: Sequence[UserRequest]) -> None:
        for request in requests:
            if request.abort_after is not None and self.step >= request.step + request.abort_after:
                request.aborted |= self.engine.abort_request(request.request_id)
                self.check()

    def happen(self) -> None:
        event = self.events.get(self.step)
        if event == "pin" and self.pin is None:
            prefix = random_tokens(20, seed=self.step % 2)
            with suppress(RequestError, CapacityError, QueueFullError, BackendError):
                self.pin = self.engine.pin_prefix({"prompt_token_ids": prefix})
        elif event == "release":
            self.release()
        elif event == "reset":
            self.engine.reset_prefix_cache()
        self.check()

    def release(self) -> None:
        if self.pin is not None:
            self.pin.release()
            self.pin = None
            self.check()

    def run_step(self, by_id: dict[str, UserRequest]) -> None:
        unfinished = self.engine.engine.has_unfinished_requests
        decodes = self._decodes()
        num_runs = self.num_runs
        try:
            outputs = self.engine.step()
        except BackendError as error:
            assert str(error) == "this step fails"  # noqa: PT017
        else:
            assert self.num_runs == num_runs + unfinished, "a step computed nothing"
            for output in outputs:
                by_id[output.request_id].outputs.append(output)
            for request, num_tokens, num_preemptions in decodes:
                gained = request.num_tokens > num_tokens or request.finished
                assert gained or request.num_preemptions > num_preemptions, "a decode stood still"
        self.check()
        self.step += 1

    def _decodes(self) -> list[tuple[Request, int, int]]:
        """Requests that are to gain a token in the next step, unless they are preempted."""
        engine = self.engine.engine
        running = engine.scheduler.running
        if len(running) > engine.limits.max_num_batched_tokens:
            return []
        return [
            (request, request.num_tokens, request.num_preemptions)
            for request in running
            if request.group is None and request.num_tokens - request.num_computed_tokens == 1
        ]


@settings(
    max_examples=700, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
@given(
    block_size=st.sampled_from(BLOCK_SIZES),
    options=options(),
    spare_blocks=st.sampled_from([0, 1, 2, 5]),
    requests=request_lists(),
    events=st.dictionaries(st.integers(0, 14), st.sampled_from(EVENTS), max_size=4),
    failing_runs=failures(14),
    failing_copies=failures(4),
    failing_runs_with_copies=failures(4),
    drafting=st.sampled_from(DRAFTING),
)
def test_every_request_gets_what_it_gets_alone(
    bundles: dict[int, Path],
    roomy: LLMEngine,
    block_size: int,
    options: EngineOptions,
    spare_blocks: int,
    requests: list[UserRequest],
    events: dict[int, str],
    failing_runs: dict[int, Failure],
    failing_copies: dict[int, Failure],
    failing_runs_with_copies: dict[int, Failure],
    drafting: str,
) -> None:
    max_num_seqs = options["max_num_seqs"]
    assert max_num_seqs is not None
    # Whoever has too few seats is refused; the others share the smallest pool for one of them.
    runnable = [request for request in requests if request.width <= max_num_seqs]
    num_blocks = max((request.num_blocks(block_size) for request in runnable), default=1)
    num_blocks += spare_blocks
    own_options: EngineOptions = {**options, "num_kv_blocks": num_blocks}
    engine = LLMEngine(bundles[block_size], **own_options)
    stage = Stage(engine, events, failing_runs, failing_copies, failing_runs_with_copies)
    have_drafted(engine, drafting)
    by_id = {}
    expected = {}
    for index, request in enumerate(requests):
        request.request_id = str(index)
        by_id[request.request_id] = request
        expected[request.request_id] = outcome_alone(request, roomy)
        if request.width > max_num_seqs:
            with pytest.raises(CapacityError, match="lower beam_width"):
                engine.add_request("refused", request.as_prompt, request.params)

    arriving = sorted(runnable, key=lambda request: request.step)
    while arriving or engine.has_unfinished_requests:
        while arriving and arriving[0].step <= stage.step and stage.add(arriving[0]):
            arriving.pop(0)
        stage.abort(runnable)
        stage.happen()
        for sequence in engine.engine.scheduler.running if drafting == "told" else ():
            name = sequence.request_id.split("/")[0]
            propose(by_id[name], sequence, expected[name])
        stage.run_step(by_id)
        assert stage.step < _most_steps(runnable, num_blocks), "no progress"

    stage.release()
    check_counts(engine, drafting)
    assert engine.engine.pool.num_available == num_blocks
    for request in runnable:
        check_outputs(request, expected[request.request_id])
        if not stage.obeys_priorities and isinstance(request.params, SamplingParams):
            # log2 of the pool, and the preemption that finds the headroom already at its largest
            most = request.params.num_sequences * (num_blocks.bit_length() + 1)
            assert all(output.metrics.num_preemptions <= most for output in request.outputs)
    engine.close()


def have_drafted(engine: LLMEngine, drafting: str) -> None:
    """Gives the engine drafters; the draft model refuses a cache that is not the target's."""
    core = engine.engine
    ngram = NgramDrafter(1, 3, sampled_vocab_size=VOCAB_SIZE)
    if drafting == "ngram":
        speculate(core, ngram, adaptive=True)
    elif drafting == "failing":
        speculate(core, FailingDrafter(after=3), ngram, num_tokens=2)
    elif drafting == "draft model":
        values = dataclasses.asdict(core.limits)
        del values["num_kv_blocks"]
        executable = NullExecutable(make_manifest(vocab_size=VOCAB_SIZE, limits=Limits(**values)))
        sampler = DraftSampler(VOCAB_SIZE)
        speculate(core, DraftModelDrafter(executable, core.limits, sampler, 4))


def check_counts(engine: LLMEngine, drafting: str) -> None:
    speculator = engine.engine.speculator
    if speculator is None:
        return
    counts = speculator.counts
    assert counts.num_accepted_tokens == sum(counts.accepted_per_position)
    assert counts.num_drafts <= counts.num_draft_tokens
    assert counts.num_accepted_tokens <= counts.num_draft_tokens
    assert counts.num_failures <= (drafting == "failing")


def _most_steps(requests: Sequence[UserRequest], num_blocks: int) -> int:
    """Each step computes a token at least, each token not much oftener than it may be preempted."""
    num_tokens = 0
    for request in requests:
        params = request.params
        width = params.num_sequences if isinstance(params, SamplingParams) else params.beam_width
        num_tokens += width * request.num_tokens
    return 40 + num_tokens * (num_blocks.bit_length() + 2)
