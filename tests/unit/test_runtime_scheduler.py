"""Who runs, in which order, and who gives way."""

from __future__ import annotations

import pytest

from octavo.graphs.errors import CapacityError
from octavo.runtime.request import RequestStatus
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
