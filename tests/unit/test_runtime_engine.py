"""The engine's step: finishing, preemption, prefix hits, failures; against a request alone."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.graphs.errors import CapacityError
from tests.unit.runtime_harness import Harness, alone, random_tokens


def test_batched_requests_get_the_tokens_they_get_alone() -> None:
    harness = Harness()
    prompts = [random_tokens(5 + 11 * i, seed=i) for i in range(8)]
    requests = [harness.add(prompt, max_tokens=10) for prompt in prompts]
    harness.run()
    assert [r.output_token_ids for r in requests] == [alone(p, 10) for p in prompts]
    assert {r.finish_reason for r in requests} == {"length"}


@pytest.mark.parametrize("budget", [1, 3, 4, 16, 17])
def test_k04_a_small_token_budget_changes_no_token(budget: int) -> None:
    """K03, K04: chunks of any size give what one prefill gives."""
    prompt = random_tokens(50)
    harness = Harness(max_num_batched_tokens=budget)
    request = harness.add(prompt, max_tokens=6)
    harness.run()
    assert request.output_token_ids == alone(prompt, 6)


@pytest.mark.parametrize("length", [16, 32, 48])
def test_k01_the_last_chunk_ends_on_a_block_boundary(length: int) -> None:
    prompt = random_tokens(length)
    harness = Harness(max_num_batched_tokens=16)
    requests = [harness.add(prompt, max_tokens=4) for _ in range(2)]
    harness.run()
    assert [r.output_token_ids for r in requests] == [alone(prompt, 4)] * 2


def test_k06_k07_a_preempted_request_resumes_with_prompt_and_output() -> None:
    harness = Harness(num_kv_blocks=6, block_size=4, enable_prefix_caching=False)
    prompts = [random_tokens(6, seed=1), random_tokens(6, seed=2)]
    requests = [harness.add(prompt, max_tokens=16) for prompt in prompts]
    harness.run()
    assert requests[0].num_preemptions == 0
    assert requests[1].num_preemptions >= 1
    assert [r.output_token_ids for r in requests] == [alone(p, 16) for p in prompts]
    resumed = [
        step
        for step in harness.steps
        if step.prefix_offsets[-1] == 0 and len(step.token_ids) > 6 and len(step.prefix_offsets) < 2
    ]
    assert resumed[0].token_ids.tolist()[:6] == prompts[1]


def test_k10_preemption_does_not_thrash() -> None:
    """Every step computes tokens and no request is preempted more than log2(blocks) + 1 times."""
    harness = Harness(num_kv_blocks=16, block_size=2, enable_prefix_caching=False)
    prompts = [random_tokens(4, seed=i) for i in range(8)]
    requests = [harness.add(prompt, max_tokens=24) for prompt in prompts]
    harness.run()
    assert [r.output_token_ids for r in requests] == [alone(p, 24) for p in prompts]
    assert max(r.num_preemptions for r in requests) <= 5
    fed = sum(len(step.token_ids) for step in harness.steps)
    useful = sum(len(p) + 24 - 1 for p in prompts)
    assert fed <= 2 * useful


def test_p01_a_full_prefix_hit_equals_a_cold_run() -> None:
    """P02: the last token is computed again, whatever is cached."""
    harness = Harness()
    prompt = random_tokens(48)
    cold = harness.add(prompt, max_tokens=20)
    harness.run()
    hit = harness.add(prompt, max_tokens=20)
    again = harness.add(prompt, max_tokens=20)
    harness.run()
    assert cold.num_cached_tokens == 0
    assert hit.num_cached_tokens == again.num_cached_tokens == 47
    expected = alone(prompt, 20)
    assert [r.output_token_ids for r in (cold, hit, again)] == [expected] * 3


def test_p03_a_stop_leaves_the_cache_as_a_cold_run_would() -> None:
    harness = Harness()
    prompt = random_tokens(40)
    expected = alone(prompt, 12)
    stopped = harness.add(prompt, max_tokens=12, stop_token_ids=[expected[5]])
    harness.run()
    later = harness.add(prompt, max_tokens=12)
    harness.run()
    assert stopped.output_token_ids == expected[:6]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", expected[5])
    assert later.output_token_ids == expected


def test_p11_tokens_recomputed_after_preemption_are_no_hits() -> None:
    harness = Harness(num_kv_blocks=6, block_size=4)
    requests = [harness.add(random_tokens(6, seed=i), max_tokens=16) for i in range(2)]
    harness.run()
    assert requests[1].num_preemptions >= 1
    assert [r.num_cached_tokens for r in requests] == [0, 0]


def test_p12_a_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    harness = Harness(num_kv_blocks=4)
    with pytest.raises(CapacityError, match=r"reach 66 tokens and so need 5 .* the pool has 4"):
        harness.add(random_tokens(58), max_tokens=8)
    # 65 tokens in all: the last one is emitted and takes no place.
    request = harness.add(random_tokens(57), max_tokens=8)
    harness.run()
    assert request.num_output_tokens == 8


def test_eos_ends_a_request_and_ignore_eos_does_not() -> None:
    """D14: all of several EOS ids are ignored."""
    prompt = random_tokens(9)
    expected = alone(prompt, 12)
    eos = [expected[7], expected[4]]
    harness = Harness()
    stopped = harness.add(prompt, 12, eos_token_ids=eos)
    ignoring = harness.add(prompt, 12, eos_token_ids=eos, ignore_eos=True)
    harness.run()
    assert stopped.output_token_ids == expected[:5]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", None)
    assert ignoring.output_token_ids == expected
    assert ignoring.finish_reason == "length"


def test_a15_a_length_cut_reports_length() -> None:
    harness = Harness(max_model_len=32)
    by_max_tokens = harness.add(random_tokens(10), max_tokens=3)
    by_model_length = harness.add(random_tokens(10), max_tokens=None)
    harness.run()
    assert (by_max_tokens.finish_reason, by_max_tokens.num_output_tokens) == ("length", 3)
    assert (by_model_length.finish_reason, by_model_length.num_tokens) == ("length", 32)


def test_b02_one_token_before_the_models_length() -> None:
    harness = Harness(max_model_len=32)
    prompt = random_tokens(31)
    request = harness.add(prompt, max_tokens=10)
    harness.run()
    assert request.output_token_ids == alone(prompt, 1)
    assert request.finish_reason == "length"


def test_accepted_drafts_stop_where_the_tokens_stop() -> None:
    """S01, S17: nothing after a stop token or the length is kept."""
    prompt = random_tokens(20)
    expected = alone(prompt, 8)
    for stop, reason, length in ((True, "stop", 3), (False, "length", 4)):
        harness = Harness()
        request = harness.add(prompt, 4, stop_token_ids=[expected[2]] if stop else [])
        harness.step()
        request.set_drafts(expected[1:6])
        harness.step()
        assert request.output_token_ids == expected[:length]
        assert request.finish_reason == reason
        harness.run()


def test_sampled_tokens_do_not_depend_on_the_batch() -> None:
    params: dict[str, Any] = {"temperature": 1.0, "top_k": 20, "top_p": 0.95, "seed": 7}
    prompts = [random_tokens(5 + 9 * i, seed=i) for i in range(6)]
    expected = []
    for prompt in prompts:
        single = Harness()
        request = single.add(prompt, 12, **params)
        single.run()
        expected.append(request.output_token_ids)
    harness = Harness(num_kv_blocks=16, block_size=8, max_num_batched_tokens=24)
    requests = [harness.add(prompt, 12, **params) for prompt in prompts]
    harness.run()
    assert [r.output_token_ids for r in requests] == expected


def test_metrics_follow_the_request() -> None:
    harness = Harness()
    request = harness.add(random_tokens(5), max_tokens=4)
    assert (
        request.times.metrics(
            num_output_tokens=0, num_cached_tokens=0, num_preemptions=0
        ).queue_time
        is None
    )
    harness.run()
    metrics = request.times.metrics(num_output_tokens=4, num_cached_tokens=0, num_preemptions=0)
    assert metrics.queue_time is not None
    assert metrics.time_to_first_token is not None
    assert metrics.time_per_output_token is not None
    assert metrics.total_time is not None
    assert 0 <= metrics.queue_time < metrics.time_to_first_token < metrics.total_time
    decoding = metrics.total_time - metrics.time_to_first_token
    assert metrics.time_per_output_token == pytest.approx(decoding / 3)


@pytest.mark.parametrize("length", [512, 600, 1000])
def test_paged_memory_wastes_less_than_one_block(length: int) -> None:
    """At most one partly filled block for each sequence: under 4 % from 512 tokens on."""
    harness = Harness(
        num_kv_blocks=300, max_model_len=1100, max_num_batched_tokens=4096, max_num_seqs=4
    )
    requests = [harness.add(random_tokens(length + i, seed=i), max_tokens=40) for i in range(4)]
    harness.step()
    for _ in range(38):
        for request in requests:
            used = request.num_computed_tokens
            held = 16 * len(request.block_ids)
            assert 0 <= held - used < 16
            assert (held - used) / held < 0.04
        harness.step()
    harness.run()
