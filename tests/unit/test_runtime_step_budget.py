"""How a step's tokens are divided among decodes and prompts."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.graphs.errors import RequestError
from octavo.runtime.step_budget import SchedulingOptions, StepBudget


def budget(tokens: int, **options: Any) -> StepBudget:
    return StepBudget(tokens, SchedulingOptions(**options))


def test_a_prompt_takes_what_the_decodes_leave() -> None:
    step = budget(10)
    assert [step.take_decode(1), step.take_decode(1), step.take_prefill(20, 0)] == [1, 1, 8]
    assert not step.admits_prefills
    assert step.take_prefill(5, 0) == 0


def test_drafts_are_cut_where_the_budget_ends() -> None:
    step = budget(3)
    assert [step.take_decode(1), step.take_decode(4), step.take_decode(1)] == [1, 2, 0]


def test_whole_prompts_follow_one_another_and_one_in_pieces_comes_last() -> None:
    step = budget(16)
    assert [step.take_prefill(5, 2), step.take_prefill(6, 1), step.take_prefill(9, 0)] == [5, 6, 5]
    # The one in pieces leaves nothing, and would leave no place for another one in pieces.
    assert not step.admits_prefills


def test_prompts_in_pieces_share_the_step() -> None:
    step = budget(12, max_num_partial_prefills=2)
    # ceil(12 / 2) for the first, and what it left for the second.
    assert [step.take_prefill(100, 3), step.take_prefill(100, 2)] == [6, 6]
    assert not step.admits_prefills


def test_a_share_is_for_prompts_that_are_there() -> None:
    step = budget(12, max_num_partial_prefills=3)
    assert step.take_prefill(100, 0) == 12
    step = budget(12, max_num_partial_prefills=3)
    assert [step.take_prefill(100, 1), step.take_prefill(100, 0)] == [6, 6]


def test_what_a_short_prompt_leaves_goes_to_those_after_it() -> None:
    step = budget(12, max_num_partial_prefills=3)
    # 12 / 3 = 4 for the first, which needs 1 and is not in pieces; 11 / 3, rounded up; 7 / 2; 3.
    shares = [step.take_prefill(missing, others) for missing, others in ((1, 3), (9, 2), (9, 1))]
    assert shares == [1, 4, 4]
    assert step.take_prefill(9, 0) == 3
    assert not step.admits_prefills


def test_a_prompt_may_limit_itself() -> None:
    step = budget(100, max_num_partial_prefills=2)
    assert [step.take_prefill(90, 0, 64), step.take_prefill(90, 0, None)] == [64, 36]
    step = budget(100)
    assert step.take_prefill(50, 0, 64) == 50
    assert step.take_prefill(90, 0, 64) == 50


def test_the_limit_beside_decodes_holds_for_all_prompts_together() -> None:
    options = {"max_prefill_tokens_beside_decodes": 8, "max_num_partial_prefills": 4}
    step = budget(64, **options)
    step.take_decode(1)
    assert [step.take_prefill(3, 1), step.take_prefill(20, 0)] == [3, 5]
    assert not step.admits_prefills


def test_the_limit_beside_decodes_needs_a_decode() -> None:
    step = budget(64, max_prefill_tokens_beside_decodes=8)
    assert step.take_decode(0) == 0  # a beam that waits for others decodes nothing
    assert step.take_prefill(100, 0) == 64


def test_the_limit_beside_decodes_does_not_raise_the_step() -> None:
    step = budget(4, max_prefill_tokens_beside_decodes=8)
    step.take_decode(1)
    assert step.take_prefill(100, 0) == 3


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"policy": "lifo"}, r"policy is 'lifo', it must be one of \('fcfs', 'priority'\)"),
        ({"max_num_waiting": 0}, "max_num_waiting is 0, it must be an integer of at least 1"),
        ({"max_num_partial_prefills": 0}, "max_num_partial_prefills is 0, it must be"),
        ({"max_num_partial_prefills": None}, "max_num_partial_prefills is None, it must be"),
        ({"max_num_partial_prefills": True}, "max_num_partial_prefills is True, it must be"),
        ({"max_prefill_tokens_beside_decodes": 1.5}, "max_prefill_tokens_beside_decodes is 1.5"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        SchedulingOptions(**options)
