"""Sequences that start in another one's blocks: copy-on-write, preemption, too few seats."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.graphs.errors import BackendError, CapacityError
from octavo.runtime.beam_group import BeamGroup
from octavo.runtime.request import Request, RequestStatus
from octavo.runtime.sampling.beam_search import BeamSearch, BeamSearchParams
from octavo.runtime.sampling.sampling_params import SamplingParams
from tests.unit.runtime_harness import Harness, random_tokens

RANDOM: dict[str, Any] = {"temperature": 1.0, "seed": 3}
COPIES = [[(1, 2), (1, 3)]]


def outputs(*requests: Request) -> list[list[int]]:
    return [request.output_token_ids for request in requests]


def sampled_alone(prompt: list[int], max_tokens: int, n: int = 3) -> list[list[int]]:
    """In an engine with room for everything, without a prefix cache."""
    harness = Harness(enable_prefix_caching=False)
    leader = harness.add(prompt, max_tokens, n=n, **RANDOM)
    followers = leader.followers
    harness.run()
    return outputs(leader, *followers)


def forked(prompt: list[int], max_tokens: int = 6, **options: Any) -> tuple[Harness, list[Request]]:
    """Three sequences after the step that computed their prompt."""
    harness = Harness(block_size=4, **options)
    leader = harness.add(prompt, max_tokens, n=3, **RANDOM)
    requests = [leader, *leader.followers]
    harness.step()
    return harness, requests


def test_three_sequences_have_three_different_outputs_of_one_prefill() -> None:
    prompt = random_tokens(6)
    harness, requests = forked(prompt)
    assert len(harness.steps[0].token_ids) == 6
    harness.run()
    assert len(harness.steps) == 6
    assert all(len(step.token_ids) == 3 for step in harness.steps[1:])
    found = outputs(*requests)
    assert found == sampled_alone(prompt, 6)
    assert len({tuple(one) for one in found}) == 3


def test_a_shared_block_is_copied_for_all_but_its_last_owner() -> None:
    harness, requests = forked(random_tokens(6))
    assert [r.block_ids for r in requests] == [[0, 1]] * 3
    assert [harness.engine.pool.ref_count(block) for block in (0, 1)] == [3, 3]
    harness.step()
    assert harness.copies == COPIES
    assert [r.block_ids for r in requests] == [[0, 2], [0, 3], [0, 1]]
    assert [harness.engine.pool.ref_count(block) for block in range(4)] == [3, 1, 1, 1]
    harness.run()
    assert harness.copies == COPIES


def test_a_prompt_that_ends_with_a_block_needs_no_copy() -> None:
    harness, requests = forked(random_tokens(8))
    assert [r.block_ids for r in requests] == [[0, 1]] * 3
    harness.step()
    assert [r.block_ids for r in requests] == [[0, 1, 2], [0, 1, 3], [0, 1, 4]]
    harness.run()
    assert harness.copies == []


def test_an_owner_that_has_ended_leaves_one_copy_less() -> None:
    harness, requests = forked(random_tokens(6))
    harness.engine.abort(requests[1])
    harness.step()
    assert harness.copies == [[(1, 2)]]
    assert [r.block_ids for r in (requests[0], requests[2])] == [[0, 2], [0, 1]]
    harness.run()


@pytest.mark.parametrize("copies_were_made", [False, True])
def test_a_failed_step_with_copies_is_undone(copies_were_made: bool) -> None:
    prompt = random_tokens(6)
    harness, requests = forked(prompt)
    copy_blocks = harness.executable.copy_blocks

    def fail(copies: object = None) -> None:
        raise BackendError("the step failed")

    if copies_were_made:
        harness.executable.on_run = fail
    else:
        harness.executable.copy_blocks = fail  # type: ignore[method-assign]
    with pytest.raises(BackendError, match="the step failed"):
        harness.engine.step()
    harness.check()
    # Whoever was to have a copy computes its two tokens anew; the last owner has them still.
    assert [(r.block_ids, r.num_computed_tokens) for r in requests] == [([0], 4)] * 2 + [
        ([0, 1], 6)
    ]
    assert harness.engine.pool.num_available == harness.engine.pool.num_blocks - 2
    harness.executable.on_run = None
    harness.executable.copy_blocks = copy_blocks  # type: ignore[method-assign]
    harness.step()
    assert [len(r.output_token_ids) for r in requests] == [2, 2, 2]
    assert len(harness.steps[-1].token_ids) == 3 + 3 + 1
    harness.run()
    assert outputs(*requests) == sampled_alone(prompt, 6)


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_a_preempted_fork_is_computed_anew_with_its_own_tokens(enable_prefix_caching: bool) -> None:
    prompt = random_tokens(7)
    # Each ends with 4 blocks, of which the first one is shared: 10 in all, one too many.
    harness, requests = forked(
        prompt, max_tokens=10, num_kv_blocks=9, enable_prefix_caching=enable_prefix_caching
    )
    harness.run()
    # One request's sequences rank by their number.
    assert [r.num_preemptions for r in requests] == [0, 0, 1]
    assert outputs(*requests) == sampled_alone(prompt, 10)


def test_followers_without_a_seat_wait_and_find_the_prompt_in_the_cache() -> None:
    prompt = random_tokens(9)
    harness, (leader, *followers) = forked(prompt, max_tokens=3, max_num_seqs=1)
    assert [f.status for f in followers] == [RequestStatus.WAITING] * 2
    assert [f.num_output_tokens for f in followers] == [1, 1]
    later = harness.add(random_tokens(4, seed=5), max_tokens=1)
    harness.run()
    assert outputs(leader, *followers) == sampled_alone(prompt, 3)
    # The leader's two decodes; then each follower: 8 of its 10 tokens are found, 2 are computed.
    fed = [(step.prefix_offsets.tolist(), len(step.token_ids)) for step in harness.steps]
    follower = [([8], 2), ([10], 1)]
    assert fed == [([0], 9), ([9], 1), ([10], 1), *follower, *follower, ([0], 4)]
    # They are of the leader's arrival and were not refused, nor do they count as hits of their own.
    assert later.finished
    assert [f.num_cached_tokens for f in followers] == [0, 0]


def test_followers_without_a_seat_and_without_a_cache_compute_the_prompt_themselves() -> None:
    prompt = random_tokens(9)
    harness, requests = forked(
        prompt, max_tokens=3, max_num_seqs=2, enable_prefix_caching=False, max_num_batched_tokens=16
    )
    harness.run()
    assert outputs(*requests) == sampled_alone(prompt, 3)
    assert harness.steps[-2].prefix_offsets.tolist() == [0]
    assert len(harness.steps[-2].token_ids) == 10


def test_an_error_of_the_leader_leaves_its_followers() -> None:
    """The engine's view; a user's request ends as a whole."""
    prompt = random_tokens(6)
    harness = Harness(block_size=4)
    leader = harness.add(prompt, 4, n=3, **RANDOM)
    followers = leader.followers
    leader.processors = (raises,)
    assert set(harness.step()) == {leader, *followers}
    assert leader.finish_reason == "error"
    assert str(leader.error) == "no"
    harness.run()
    assert outputs(*followers) == sampled_alone(prompt, 4)[1:]
    assert leader.output_token_ids == []


def raises(row: object) -> None:
    raise BackendError("no")


def add_beams(harness: Harness, prompt: list[int], width: int, max_tokens: int = 6) -> BeamGroup:
    params = BeamSearchParams(beam_width=width, max_tokens=max_tokens)
    root = Request(
        f"beams of {prompt}",
        prompt,
        SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
        max_model_len=harness.engine.limits.max_model_len,
        eos_token_ids=(),
        seed=0,
    )
    group = BeamGroup(BeamSearch(params, eos_token_ids=(), max_output_tokens=max_tokens), root)
    harness.engine.add_request(root)
    return group


def hypotheses(group: BeamGroup) -> list[tuple[list[int], float]]:
    return [(one.token_ids, one.score) for one in group.search.hypotheses()]


def beams_alone(
    prompt: list[int], width: int, max_tokens: int = 6
) -> list[tuple[list[int], float]]:
    harness = Harness(enable_prefix_caching=False)
    group = add_beams(harness, prompt, width, max_tokens)
    harness.run()
    return hypotheses(group)


def test_a_beam_search_without_enough_seats_is_refused() -> None:
    harness = Harness(max_num_seqs=3)
    with pytest.raises(
        CapacityError, match="width 4 runs 4 sequences side by side, max_num_seqs is 3: lower"
    ):
        add_beams(harness, random_tokens(5), width=4)
    assert not harness.engine.has_unfinished_requests


def test_a_beam_search_needs_blocks_for_all_beams() -> None:
    prompt = random_tokens(5)
    harness = Harness(block_size=4, num_kv_blocks=8)
    # 5 + 6 tokens, the last one not fed: 3 blocks for each of 3 beams.
    with pytest.raises(CapacityError, match="reach 11 tokens and so need 9 cache blocks"):
        add_beams(harness, prompt, width=3)
    harness = Harness(block_size=4, num_kv_blocks=9)
    group = add_beams(harness, prompt, width=3)
    harness.run()
    assert hypotheses(group) == beams_alone(prompt, 3)


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_a_beam_search_in_just_enough_seats_computes_nothing_twice(
    enable_prefix_caching: bool,
) -> None:
    prompt = random_tokens(5)
    harness = Harness(max_num_seqs=4, enable_prefix_caching=enable_prefix_caching)
    group = add_beams(harness, prompt, width=4)
    harness.run()
    assert hypotheses(group) == beams_alone(prompt, 4)
    assert [len(step.token_ids) for step in harness.steps] == [5, 4, 4, 4, 4, 4]


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_two_beam_searches_in_four_seats_do_not_wait_for_each_other(
    enable_prefix_caching: bool,
) -> None:
    prompts = [random_tokens(5, seed=i) for i in range(2)]
    harness = Harness(max_num_seqs=4, block_size=4, enable_prefix_caching=enable_prefix_caching)
    groups = [add_beams(harness, prompt, width=4) for prompt in prompts]
    beside = harness.add(random_tokens(5, seed=7), max_tokens=12)
    steps = 0
    while harness.engine.has_unfinished_requests:
        harness.step()
        steps += 1
        assert steps < 60
    assert harness.engine.scheduler.num_preemptions >= 1
    assert [hypotheses(group) for group in groups] == [beams_alone(p, 4) for p in prompts]
    assert beside.num_output_tokens == 12


def test_a_preempted_beam_is_computed_again_before_its_group_goes_on() -> None:
    prompt = random_tokens(6)
    harness = Harness(block_size=4, enable_prefix_caching=False)
    group = add_beams(harness, prompt, width=3)
    harness.step()
    harness.step()
    scheduler = harness.engine.scheduler
    scheduler._preempt(scheduler.running[-1])
    before = group.search.num_tokens
    harness.step()
    assert group.search.num_tokens == before + 1
    harness.run()
    assert hypotheses(group) == beams_alone(prompt, 3)
