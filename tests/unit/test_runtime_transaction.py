"""A step happens as a whole or not at all; a request can end at any time."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.backends.base import StepInputs
from octavo.graphs.errors import BackendError
from octavo.runtime import invariants
from tests.unit.runtime_harness import Harness, alone, random_tokens


def test_a_failed_step_restores_the_state_before_it() -> None:
    harness = Harness(block_size=4, max_num_batched_tokens=24)
    prompts = [random_tokens(15 + i, seed=i) for i in range(3)]
    requests = [harness.add(prompt, max_tokens=10) for prompt in prompts]

    def fail() -> None:
        raise BackendError("the step failed")

    for _ in range(12):
        before = invariants.snapshot(harness.engine.scheduler)
        available = harness.engine.pool.num_available
        harness.executable.on_run = fail
        with pytest.raises(BackendError, match="the step failed"):
            harness.engine.step()
        after = invariants.snapshot(harness.engine.scheduler)
        assert (after.running, after.waiting) == (before.running, before.waiting)
        assert (after.ref_counts, after.cached) == (before.ref_counts, before.cached)
        assert harness.engine.pool.num_available == available
        harness.check()
        harness.executable.on_run = None
        harness.step()
    harness.run()
    assert [r.output_token_ids for r in requests] == [alone(p, 10) for p in prompts]


def test_a_failed_step_after_a_preemption_leaves_requests_consistent() -> None:
    harness = Harness(num_kv_blocks=6, block_size=4)
    prompts = [random_tokens(6, seed=1), random_tokens(6, seed=2)]
    requests = [harness.add(prompt, max_tokens=16) for prompt in prompts]

    def interrupt() -> None:
        harness.executable.on_run = None
        raise KeyboardInterrupt

    while requests[1].num_preemptions == 0:
        harness.executable.on_run = interrupt
        with pytest.raises(KeyboardInterrupt):
            harness.engine.step()
        harness.check()
        harness.step()
    harness.run()
    assert [r.output_token_ids for r in requests] == [alone(p, 16) for p in prompts]


def test_logits_without_a_finite_maximum_fail_their_request_alone() -> None:
    harness = Harness()
    prompts = [random_tokens(5, seed=i) for i in range(2)]
    requests = [harness.add(prompt) for prompt in prompts]
    run = harness.executable.run

    def poisoned(inputs: StepInputs) -> object:
        outputs = run(inputs)
        outputs.logits[0, 3] = np.nan
        return outputs

    harness.executable.run = poisoned  # type: ignore[method-assign, assignment]
    assert harness.step() == requests
    assert requests[0].finish_reason == "error"
    assert isinstance(requests[0].error, BackendError)
    assert "largest value is nan" in str(requests[0].error)
    harness.executable.run = run  # type: ignore[method-assign]
    harness.run()
    assert requests[1].output_token_ids == alone(prompts[1], 8)


def test_p08_a_block_is_found_only_after_it_was_computed() -> None:
    harness = Harness(max_num_batched_tokens=16)
    prompt = random_tokens(64)

    def fail() -> None:
        raise BackendError("the step failed")

    first = harness.add(prompt)
    harness.executable.on_run = fail
    with pytest.raises(BackendError):
        harness.step()
    assert harness.engine.prefix_cache is not None
    assert harness.engine.prefix_cache.entries() == ()
    harness.executable.on_run = None
    harness.step()
    assert len(harness.engine.prefix_cache.entries()) == 1
    harness.engine.abort(first)
    second = harness.add(prompt)
    harness.run()
    assert second.num_cached_tokens == 16
    assert second.output_token_ids == alone(prompt, 8)


def test_abort_at_every_stage_frees_everything() -> None:
    harness = Harness(max_num_batched_tokens=16, max_num_seqs=2)
    requests = [harness.add(random_tokens(20, seed=i), max_tokens=5) for i in range(4)]
    harness.step()  # the first is in the middle of its prefill, the others wait
    for request in (requests[3], requests[0]):
        harness.engine.abort(request)
        assert request.finish_reason == "abort"
        harness.check()
    harness.engine.abort(requests[0])  # once more, harmless
    harness.run()
    for request in requests[1:3]:
        assert request.output_token_ids == alone(request.prompt_token_ids, 5)
