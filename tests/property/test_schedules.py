"""Any schedule: every request gets exactly the tokens it gets alone, and nothing leaks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.graphs.errors import BackendError, CapacityError
from octavo.runtime.request import Request
from tests.unit.runtime_harness import VOCAB_SIZE, Harness, alone, random_tokens

MAX_MODEL_LEN = 48


@dataclass
class Arrival:
    """A request that arrives before the given step, and perhaps is aborted at a later one."""

    step: int
    prompt: list[int]
    max_tokens: int | None
    abort_after: int | None
    drafts: int
    salt: bytes
    params: dict[str, Any]
    request: Request | None = field(default=None, compare=False)


@st.composite
def arrivals(draw: st.DrawFn) -> Arrival:
    # Few different beginnings, so that prefixes are often shared.
    prefix = random_tokens(draw(st.integers(0, 24)), seed=draw(st.integers(0, 1)))
    tail = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=0 if prefix else 1, max_size=12))
    sampled = draw(st.booleans()) and draw(st.booleans())
    return Arrival(
        step=draw(st.sampled_from([0, 0, 0, 1, 2, 5, 9])),
        prompt=prefix + tail,
        max_tokens=draw(st.one_of(st.none(), st.integers(1, 20))),
        abort_after=draw(st.one_of(st.none(), st.none(), st.integers(0, 10))),
        drafts=draw(st.sampled_from([0, 0, 0, 1, 4])),
        salt=draw(st.sampled_from([b"", b"", b"a"])),
        params={"temperature": 1.0, "seed": draw(st.integers(0, 3))} if sampled else {},
    )


@st.composite
def harnesses(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "block_size": draw(st.sampled_from([1, 2, 4, 5, 16])),
        "max_num_seqs": draw(st.integers(1, 6)),
        "max_num_batched_tokens": draw(st.sampled_from([1, 2, 5, 16, 40])),
        "enable_prefix_caching": draw(st.booleans()),
        "max_model_len": MAX_MODEL_LEN,
    }


def expected_tokens(arrival: Arrival, block_size: int) -> list[int]:
    """What the request gets alone, in a pool that never runs out and without any cache."""
    if arrival.params:
        harness = Harness(
            block_size=block_size,
            num_kv_blocks=MAX_MODEL_LEN,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=64,
            enable_prefix_caching=False,
        )
        request = harness.add(arrival.prompt, arrival.max_tokens, **arrival.params)
        harness.run()
        return request.output_token_ids
    room = MAX_MODEL_LEN - len(arrival.prompt)
    count = room if arrival.max_tokens is None else min(room, arrival.max_tokens)
    return alone(arrival.prompt, count)


def propose(request: Request, count: int) -> None:
    """Drafts of which some are right: the true continuation with its third token changed."""
    room = request.max_total_tokens - request.num_tokens - 1
    tokens = request.tokens(0, request.num_tokens).tolist()
    drafts = alone(tokens, min(count, room))
    if len(drafts) > 2:
        drafts[2] = (drafts[2] + 1) % VOCAB_SIZE
    if drafts:
        request.set_drafts(drafts)


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(
    options=harnesses(),
    spare_blocks=st.integers(0, 6),
    schedule=st.lists(arrivals(), min_size=1, max_size=8),
    failing_steps=st.sets(st.integers(0, 11), max_size=4),
)
def test_every_schedule(
    options: dict[str, Any], spare_blocks: int, schedule: list[Arrival], failing_steps: set[int]
) -> None:
    block_size = options["block_size"]
    # The smallest pool that holds one request, and a little more.
    longest = max(min(len(a.prompt) + (a.max_tokens or 99), MAX_MODEL_LEN) for a in schedule)
    num_blocks = -(-(longest - 1) // block_size) + spare_blocks
    harness = Harness(num_kv_blocks=num_blocks, **options)
    waiting = sorted(schedule, key=lambda arrival: arrival.step)

    def fail() -> None:
        raise BackendError("this step fails")

    step = 0
    while waiting or harness.engine.has_unfinished_requests:
        while waiting and waiting[0].step <= step:
            arrival = waiting.pop(0)
            arrival.request = harness.add(
                arrival.prompt, arrival.max_tokens, salt=arrival.salt, **arrival.params
            )
        for arrival in schedule:
            if arrival.request is None:
                continue
            if arrival.abort_after is not None and step >= arrival.step + arrival.abort_after:
                harness.engine.abort(arrival.request)
                harness.check()
            elif arrival.request in harness.engine.scheduler.running and not (
                arrival.request.num_tokens - arrival.request.num_computed_tokens > 1
            ):
                propose(arrival.request, arrival.drafts)
        harness.executable.on_run = fail if step in failing_steps else None
        unfinished = harness.engine.has_unfinished_requests
        steps_before = len(harness.steps)
        try:
            harness.step()
        except BackendError as error:
            assert str(error) == "this step fails"  # noqa: PT017
            harness.check()
        assert len(harness.steps) == steps_before + unfinished, "a step computed nothing"
        step += 1
        assert step < 5000, "no progress"

    for executed in harness.steps:
        assert len(executed.prefix_offsets) <= options["max_num_seqs"]
        assert len(executed.token_ids) <= options["max_num_batched_tokens"]
    assert harness.engine.pool.num_available == num_blocks
    for arrival in schedule:
        assert arrival.request is not None
        expected = expected_tokens(arrival, block_size)
        output = arrival.request.output_token_ids
        if arrival.request.finish_reason == "abort":
            assert output == expected[: len(output)]
        else:
            assert output == expected
        # log2 of the pool, and the preemption that finds the headroom already at its largest
        assert arrival.request.num_preemptions <= num_blocks.bit_length() + 1


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    num_blocks=st.integers(1, 6),
    block_size=st.sampled_from([1, 4, 16]),
    length=st.integers(1, 60),
    max_tokens=st.integers(1, 40),
)
def test_a_request_is_refused_exactly_when_it_can_not_fit(
    num_blocks: int, block_size: int, length: int, max_tokens: int
) -> None:
    harness = Harness(num_kv_blocks=num_blocks, block_size=block_size, max_model_len=100)
    prompt = random_tokens(length)
    if min(length + max_tokens, 100) - 1 > num_blocks * block_size:
        try:
            harness.add(prompt, max_tokens)
        except CapacityError:
            return
        raise AssertionError("the request was not refused")
    request = harness.add(prompt, max_tokens)
    harness.run()
    assert request.output_token_ids == alone(prompt, max_tokens)
