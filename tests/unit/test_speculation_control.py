"""How many tokens are drafted: simulated engines whose steps cost what the test says."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any, cast

import pytest

from octavo.runtime.request import Request
from octavo.runtime.sampling.sampling_params import SamplingParams
from octavo.runtime.speculation.draft_controller import DraftController, StepCost
from octavo.runtime.speculation.verified import Verified

# Of SmolLM2 in int8 on two cores, in milliseconds: a step, and each of its tokens.
BASE, TOKEN = 3.6, 0.16
MOST = 8


def request(number: int = 0) -> Request:
    return Request(
        str(number), [1, 2, 3], SamplingParams(), max_model_len=100, eos_token_ids=(), seed=0
    )


# Whether a draft of the token at a position would be right; None where nothing is proposed there.
Text = Callable[[int], bool | None]


def free(number: int) -> Text:
    """An n-gram is found half of the time, and holds for a tenth of the tokens."""

    def is_right(position: int) -> bool | None:
        generator = random.Random(f"{number} {position}")
        return None if generator.random() < 0.5 else generator.random() < 0.1

    return is_right


def model(number: int) -> Text:
    return lambda position: random.Random(f"{number} {position}").random() < 0.8


def copying(number: int) -> Text:
    """Sixty tokens are copied, then twenty are new."""
    return lambda position: (position + 7 * number) % 80 < 60


def speed(
    texts: Callable[[int], Text],
    num_seqs: int,
    *,
    length: int | None,
    draft: float = 0.0,
    steps: int = 400,
) -> float:
    """Tokens a millisecond; `length` drafts always, or those of the controller (None)."""
    controller = DraftController({"drafter": MOST})
    requests = [request(number) for number in range(num_seqs)]
    sources = [texts(number) for number in range(num_seqs)]
    positions, drafts = [0] * num_seqs, [0] * num_seqs
    milliseconds = 0.0
    for _ in range(steps):
        num_tokens = num_seqs + sum(drafts)
        cost = BASE + TOKEN * num_tokens
        controller.observe_step(num_tokens, cost / 1000)
        for index, (one, count) in enumerate(zip(requests, drafts, strict=True)):
            accepted = 0
            while accepted < count and sources[index](positions[index] + accepted):
                accepted += 1
            if count:
                controller.observe_verified(Verified(one, "drafter", count, accepted))
            positions[index] += accepted + 1
        controller.begin(num_seqs)
        drafts = []
        for one, source, position in zip(requests, sources, positions, strict=True):
            wanted = controller.length(one, "drafter") if length is None else length
            drafts.append(0 if source(position) is None else wanted)
        controller.observe_drafting("drafter", sum(drafts), draft * sum(drafts) / 1000)
        milliseconds += cost + draft * sum(drafts)
    return sum(positions) / milliseconds


@pytest.mark.parametrize("num_seqs", [1, 8, 32])
@pytest.mark.parametrize("texts", [free, model, copying])
def test_it_is_never_much_slower_than_no_drafts(
    texts: Callable[[int], Text], num_seqs: int
) -> None:
    plain = speed(texts, num_seqs, length=0)
    assert speed(texts, num_seqs, length=None) >= 0.95 * plain


@pytest.mark.parametrize("num_seqs", [1, 8])
@pytest.mark.parametrize("texts", [model, copying])
def test_it_is_nearly_as_fast_as_the_best_fixed_number(
    texts: Callable[[int], Text], num_seqs: int
) -> None:
    best = max(speed(texts, num_seqs, length=count) for count in range(MOST + 1))
    assert speed(texts, num_seqs, length=None) >= 0.85 * best


def test_a_drafter_that_costs_more_than_it_gains_is_hardly_asked() -> None:
    """A draft takes as long as a step: nothing that it says can pay."""
    plain = speed(model, 1, length=0)
    assert speed(model, 1, length=4, draft=BASE) < 0.8 * plain
    assert speed(model, 1, length=None, draft=BASE) >= 0.95 * plain


def test_a_fixed_number_is_kept_where_nothing_is_to_be_adapted() -> None:
    controller = DraftController({"a": 3, "b": 5}, adaptive=False)
    one = request()
    for _ in range(30):
        controller.observe_verified(Verified(one, "a", 3, 0))
    assert (controller.length(one, "a"), controller.length(one, "b")) == (3, 5)
    assert controller.max_tokens == 5


def test_each_sequence_is_judged_by_its_own_drafts() -> None:
    controller = DraftController({"a": 8})
    for num_tokens in (1, 9, 1, 9):
        controller.observe_step(num_tokens, (BASE + TOKEN * num_tokens) / 1000)
    lucky, unlucky = request(0), request(1)
    for _ in range(20):
        controller.observe_verified(Verified(lucky, "a", 4, 4))
        controller.observe_verified(Verified(unlucky, "a", 4, 0))
    assert controller.length(lucky, "a") == 8
    assert controller.length(unlucky, "a") == 0


def test_the_cost_of_a_step_is_fitted() -> None:
    cost = StepCost()
    assert cost.fit() is None
    cost.observe(4, 5.0)
    cost.observe(4, 5.0)
    assert cost.fit() is None  # one size tells nothing of the slope
    for num_tokens in (1, 5, 9):
        cost.observe(num_tokens, 3.0 + 0.5 * num_tokens)
    fitted = cost.fit()
    assert fitted is not None
    assert fitted == pytest.approx((3.0, 0.5))


@pytest.mark.parametrize("seconds", [0.0, 1e-9, 1e9])
def test_no_measurement_breaks_it(seconds: float) -> None:
    controller = DraftController({"a": 8})
    one = request()
    for num_tokens in (1, 2, 3, 1, 2, 3):
        controller.observe_step(num_tokens, seconds)
        controller.observe_drafting("a", 2, seconds)
        controller.observe_verified(Verified(one, "a", 2, num_tokens % 3))
        assert 0 <= controller.length(one, "a") <= 8
    assert all(math.isfinite(x) for x in cast("tuple[Any, ...]", controller._cost.fit()))
