"""Who runs, in which order, and who gives way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from octavo.graphs.errors import CapacityError, QueueFullError
from octavo.runtime.request import RequestStatus
from octavo.runtime.step_budget import SchedulingOptions
from tests.unit.runtime_harness import Harness, alone, random_tokens


def plan(harness: Harness) -> list[tuple[str, int]]:
    """(request id, tokens) of the next step, which is not run."""
    planned = harness.engine.scheduler.plan()
    harness.engine.scheduler.rollback(planned)
    return [(entry.request.request_id, entry.num_new_tokens) for entry in planned.scheduled]


def test_the_budget_is_shared_in_the_order_of_arrival() -> None:
    harness = Harness(max_num_batched_tokens=64)
    for i, length in enumerate((30, 20, 40, 10)):
        harness.add(random_tokens(length, seed=i))
    assert plan(harness) == [("0", 30), ("1", 20), ("2", 14)]
    harness.step()
    assert plan(harness) == [("0", 1), ("1", 1), ("2", 26), ("3", 10)]


def test_no_more_sequences_than_max_num_seqs() -> None:
    harness = Harness(max_num_seqs=2)
    for i in range(4):
        harness.add(random_tokens(5, seed=i), max_tokens=3)
    assert plan(harness) == [("0", 5), ("1", 5)]
    harness.run()
    assert max(len(step.prefix_offsets) for step in harness.steps) == 2


def test_fewer_tokens_than_sequences_in_a_step() -> None:
    harness = Harness(max_num_batched_tokens=3, max_num_seqs=8)
    prompts = [random_tokens(4, seed=i) for i in range(6)]
    requests = [harness.add(prompt, max_tokens=5) for prompt in prompts]
    harness.run()
    assert [r.output_token_ids for r in requests] == [alone(p, 5) for p in prompts]


def test_drafts_count_towards_the_budget() -> None:
    harness = Harness(max_num_batched_tokens=8)
    request = harness.add(random_tokens(6), max_tokens=20)
    harness.step()
    request.set_drafts([1, 2, 3, 4])
    harness.add(random_tokens(9, seed=1))
    assert plan(harness) == [("0", 5), ("1", 3)]


def test_drafts_take_no_token_from_another_decode() -> None:
    harness = Harness(max_num_batched_tokens=16)
    requests = [harness.add(random_tokens(4, seed=i)) for i in range(3)]
    harness.step()
    harness.engine.scheduler.limits = replace(harness.engine.limits, max_num_batched_tokens=4)
    requests[0].set_drafts([1, 2, 3])
    assert plan(harness) == [("0", 2), ("1", 1), ("2", 1)]


def test_drafts_are_dropped_before_anyone_is_preempted() -> None:
    harness = Harness(num_kv_blocks=4, block_size=4)
    requests = [harness.add(random_tokens(5, seed=i), max_tokens=4) for i in range(2)]
    harness.step()
    requests[0].set_drafts([1, 2, 3])
    assert plan(harness) == [("0", 1), ("1", 1)]
    assert requests[0].num_drafts == 0
    assert [r.num_preemptions for r in requests] == [0, 0]


def test_the_youngest_is_preempted_and_queued_first() -> None:
    harness = Harness(num_kv_blocks=4, block_size=4, enable_prefix_caching=False)
    requests = [harness.add(random_tokens(3, seed=i), max_tokens=10) for i in range(3)]
    while not any(r.num_preemptions for r in requests):
        harness.step()
    assert [r.num_preemptions for r in requests[:2]] == [0, 0] or requests[0].num_preemptions == 0
    preempted = [r for r in requests if r.status is RequestStatus.PREEMPTED]
    assert preempted
    waiting = list(harness.engine.scheduler.waiting)
    assert waiting[: len(preempted)] == preempted
    assert preempted[-1] is requests[-1] or waiting[-1] is requests[-1]
    harness.run()
    assert [r.output_token_ids for r in requests] == [
        alone(r.prompt_token_ids, 10) for r in requests
    ]


def test_a_request_waits_until_all_its_known_tokens_fit() -> None:
    harness = Harness(num_kv_blocks=8, block_size=4, max_num_batched_tokens=8)
    first = harness.add(random_tokens(16), max_tokens=9)
    second = harness.add(random_tokens(12, seed=1), max_tokens=1)
    harness.step()
    harness.step()
    # 4 blocks are taken, 3 are needed at once; the first may soon need one of the rest, and
    # headroom of one block for each of two running requests is asked for.
    assert plan(harness) == [("0", 1)]
    harness.run()
    assert first.num_preemptions == second.num_preemptions == 0


def test_check_fits_names_the_numbers() -> None:
    harness = Harness(num_kv_blocks=2, block_size=4)
    with pytest.raises(CapacityError, match="lower max_tokens"):
        harness.add(random_tokens(8), max_tokens=2)
    assert not harness.engine.has_unfinished_requests
    harness.add(random_tokens(8), max_tokens=1)
    harness.run()


@pytest.mark.parametrize(("num_preemptions", "admitted"), [(0, True), (4, True), (5, False)])
def test_k10_each_preemption_doubles_the_headroom_a_request_waits_for(
    num_preemptions: int, admitted: bool
) -> None:
    harness = Harness(num_kv_blocks=64, block_size=1)
    harness.add(random_tokens(10), max_tokens=50)
    harness.step()
    # 54 blocks are left: 1 is promised to the first request, the second needs 10 at once, and the
    # headroom for two is 2 << 4 = 32 blocks, then 64.
    request = harness.add(random_tokens(10, seed=1), max_tokens=30)
    request.num_preemptions = num_preemptions
    assert (("1", 10) in plan(harness)) is admitted
    harness.run()
    assert request.output_token_ids == alone(random_tokens(10, seed=1), 30)


@pytest.mark.parametrize("beside", [None, 4])
def test_a_decode_waits_for_one_step_at_most_whatever_prompts_are_beside_it(
    beside: int | None,
) -> None:
    """The bound on its delay: a step of max_num_batched_tokens, or of fewer if so limited."""
    harness = Harness(
        max_num_batched_tokens=16,
        num_kv_blocks=200,
        scheduling=SchedulingOptions(max_prefill_tokens_beside_decodes=beside),
    )
    decodes = [harness.add(random_tokens(5, seed=i), max_tokens=25) for i in range(3)]
    harness.step()
    prompts = [harness.add(random_tokens(200, seed=i), max_tokens=1) for i in range(4)]
    for num_tokens in range(2, 26):
        harness.step()
        assert [request.num_output_tokens for request in decodes] == [num_tokens] * 3
        assert len(harness.steps[-1].token_ids) == 3 + (beside or 13)
    harness.run()
    # Without decodes the limit beside them does not hold.
    assert max(len(step.token_ids) for step in harness.steps[-8:]) == 16
    assert [r.output_token_ids for r in prompts] == [alone(r.prompt_token_ids, 1) for r in prompts]


def test_prompt_tokens_beside_decodes_are_limited_until_the_decodes_have_ended() -> None:
    options = SchedulingOptions(max_prefill_tokens_beside_decodes=3)
    harness = Harness(max_num_batched_tokens=64, scheduling=options)
    harness.add(random_tokens(5), max_tokens=3)
    harness.step()
    harness.add(random_tokens(20, seed=1))
    planned = []
    for _ in range(3):
        planned.append(plan(harness))
        harness.step()
    assert planned == [[("0", 1), ("1", 3)], [("0", 1), ("1", 3)], [("1", 14)]]


def test_a_short_prompt_gets_past_a_long_one_if_two_may_be_in_pieces() -> None:
    steps: dict[int, list[list[tuple[str, int]]]] = {}
    for most in (1, 2):
        options = SchedulingOptions(max_num_partial_prefills=most)
        harness = Harness(max_num_batched_tokens=8, scheduling=options)
        harness.add(random_tokens(20), max_tokens=5)
        harness.add(random_tokens(3, seed=1), max_tokens=5)
        steps[most] = []
        for _ in range(3):
            steps[most].append(plan(harness))
            harness.step()
    assert steps[1] == [[("0", 8)], [("0", 8)], [("0", 4), ("1", 3)]]
    # Half of 8 each, of which the short one needs 3; then it decodes and the long one has the rest.
    assert steps[2] == [[("0", 4), ("1", 3)], [("0", 7), ("1", 1)], [("0", 7), ("1", 1)]]


def test_no_more_prompts_in_pieces_than_allowed() -> None:
    options = SchedulingOptions(max_num_partial_prefills=2)
    harness = Harness(max_num_batched_tokens=8, scheduling=options)
    for i in range(4):
        harness.add(random_tokens(20, seed=i))
    planned = []
    for _ in range(6):
        planned.append(plan(harness))
        harness.step()
    assert planned[:4] == [[("0", 4), ("1", 4)]] * 4
    # The last 4 tokens of the first are no piece: two of the others may share what they leave.
    assert planned[4] == [("0", 4), ("1", 2), ("2", 2)]
    # 1 decodes, the second ends with 2 of 7 / 2, the third has 5 / 2 and the fourth the rest.
    assert planned[5] == [("0", 1), ("1", 2), ("2", 3), ("3", 2)]


PRIORITY = SchedulingOptions(policy="priority")


def test_lower_priorities_come_first_and_equal_ones_in_the_order_of_arrival() -> None:
    harness = Harness(max_num_batched_tokens=8, scheduling=PRIORITY)
    for index, priority in enumerate((1, 0, 1, -3, 0)):
        harness.add(random_tokens(2, seed=index), max_tokens=1, priority=priority)
    assert plan(harness) == [("3", 2), ("1", 2), ("4", 2), ("0", 2)]


def test_an_important_request_pushes_out_the_least_important_one() -> None:
    harness = Harness(max_num_seqs=3, scheduling=PRIORITY)
    requests = [
        harness.add(random_tokens(5, seed=i), max_tokens=6, priority=priority)
        for i, priority in enumerate((2, 3, 2))
    ]
    harness.step()
    important = harness.add(random_tokens(5, seed=9), max_tokens=6, priority=1)
    assert plan(harness) == [("0", 1), ("2", 1), ("3", 5)]
    assert [r.num_preemptions for r in requests] == [0, 1, 0]
    harness.run()
    assert [r.output_token_ids for r in (*requests, important)] == [
        alone(r.prompt_token_ids, 6) for r in (*requests, important)
    ]


def test_an_important_request_pushes_out_for_blocks_as_far_as_it_needs_them() -> None:
    harness = Harness(
        num_kv_blocks=12, block_size=4, scheduling=PRIORITY, enable_prefix_caching=False
    )
    # Two blocks each at first, and a third one at 9 tokens.
    requests = [
        harness.add(random_tokens(7, seed=i), max_tokens=4, priority=5 - i) for i in range(4)
    ]
    harness.step()
    # 8 are in use, 4 are free. It needs 5 at once, 1 later, and each of the others 1 more.
    important = harness.add(random_tokens(18, seed=9), max_tokens=4, priority=0)
    harness.step()
    assert [r.num_preemptions for r in requests] == [1, 1, 0, 0]
    assert important.num_output_tokens == 1
    harness.run()
    assert [r.output_token_ids for r in requests] == [
        alone(r.prompt_token_ids, 4) for r in requests
    ]


def test_nobody_is_pushed_out_for_a_request_that_has_no_room_even_then() -> None:
    harness = Harness(
        num_kv_blocks=8, block_size=4, scheduling=PRIORITY, enable_prefix_caching=False
    )
    first = harness.add(random_tokens(18), max_tokens=3, priority=0)  # 5 blocks of the 8
    low = harness.add(random_tokens(3, seed=1), max_tokens=2, priority=9)
    harness.step()
    big = harness.add(random_tokens(13, seed=2), max_tokens=2, priority=1)  # 4 at once
    harness.step()
    assert low.num_preemptions == 0
    assert low.finished
    harness.run()
    assert [r.output_token_ids for r in (first, low, big)] == [
        alone(r.prompt_token_ids, r.num_output_tokens) for r in (first, low, big)
    ]


def test_the_blocks_that_victims_share_are_freed_with_the_last_of_them() -> None:
    harness = Harness(
        num_kv_blocks=8, block_size=4, scheduling=PRIORITY, enable_prefix_caching=False
    )
    low = harness.add(random_tokens(17), max_tokens=4, priority=5, n=3, temperature=1.0)
    harness.step()
    assert harness.engine.pool.num_available == 3
    important = harness.add(random_tokens(17, seed=1), max_tokens=4, priority=0)
    harness.step()
    assert important.num_output_tokens == 1
    assert low.num_preemptions == 1
    harness.run()
    assert important.output_token_ids == alone(important.prompt_token_ids, 4)


def test_equals_are_not_pushed_out_and_fcfs_pushes_out_nobody() -> None:
    for options, priority in ((PRIORITY, 2), (SchedulingOptions(), 0)):
        harness = Harness(max_num_seqs=1, scheduling=options)
        first = harness.add(random_tokens(5), max_tokens=6, priority=2 if priority else 0)
        harness.step()
        harness.add(random_tokens(5, seed=1), max_tokens=6, priority=priority)
        assert plan(harness) == [("0", 1)]
        harness.run()
        assert first.num_preemptions == 0


def test_what_was_pushed_out_ends_once_nothing_more_important_arrives() -> None:
    harness = Harness(max_num_seqs=1, scheduling=PRIORITY)
    low = harness.add(random_tokens(20), max_tokens=10, priority=7)
    for index in range(12):
        harness.step()
        harness.add(random_tokens(5, seed=index), max_tokens=1, priority=0)
    assert low.num_output_tokens <= 6
    harness.run()
    assert low.output_token_ids == alone(low.prompt_token_ids, 10)


def test_a_full_queue_refuses_until_a_request_has_left_it() -> None:
    harness = Harness(max_num_seqs=1, scheduling=SchedulingOptions(max_num_waiting=2))
    # One finds a free place, the others wait.
    requests = [harness.add(random_tokens(3, seed=i), max_tokens=2) for i in range(3)]
    with pytest.raises(QueueFullError, match="2 requests are waiting, max_num_waiting is 2"):
        harness.add(random_tokens(3))
    harness.step()
    with pytest.raises(QueueFullError):
        harness.add(random_tokens(3))
    harness.engine.abort(requests.pop())
    requests.append(harness.add(random_tokens(3, seed=3), max_tokens=2))
    harness.run()
    assert all(r.output_token_ids == alone(r.prompt_token_ids, 2) for r in requests)
