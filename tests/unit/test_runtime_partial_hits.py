"""Prefix hits that end within a block: what is copied, and that nobody's block is written into."""

from __future__ import annotations

import pytest

from octavo.graphs.errors import BackendError
from octavo.runtime.request import Request
from tests.unit.runtime_harness import Harness, alone, random_tokens

PROMPT = random_tokens(12)
OTHER = (PROMPT[6] + 1) % 97  # a token that does not continue PROMPT's first six


def finished(harness: Harness, prompt: list[int], **options: object) -> Request:
    """A request that ran alone."""
    request = harness.add(prompt, 4, **options)  # type: ignore[arg-type]
    harness.run()
    assert request.output_token_ids == alone(prompt, 4)
    return request


def test_a_block_is_reused_as_far_as_its_tokens_agree() -> None:
    harness = Harness(block_size=4)
    finished(harness, PROMPT)
    for shared in range(1, 12):
        # Another token than PROMPT's follows; the last token is always computed.
        prompt = [*PROMPT[:shared], (PROMPT[shared] + 1) % 97, 5]
        assert finished(harness, prompt).num_cached_tokens == shared
    # Nobody wrote into the blocks that were copied.
    assert finished(harness, PROMPT).num_cached_tokens == 11


def test_the_copy_is_what_the_step_computes_on() -> None:
    harness = Harness(block_size=4)
    first = harness.add(PROMPT, 20)
    harness.step()
    source = first.block_ids[1]
    harness.steps.clear()
    second = harness.add([*PROMPT[:6], OTHER, 5], 20)
    harness.step()
    assert harness.copies == [[(source, second.block_ids[1])]]
    # One token of the first request, two of the second from position 6 on, in its own block.
    assert harness.steps[0].positions.tolist() == [12, 6, 7]
    offset = 4 * second.block_ids[1]
    assert harness.steps[0].slot_mapping.tolist()[1:] == [offset + 2, offset + 3]
    harness.run()
    assert first.output_token_ids == alone(PROMPT, 20)
    assert second.output_token_ids == alone([*PROMPT[:6], OTHER, 5], 20)


def test_the_block_with_most_in_common_is_taken() -> None:
    harness = Harness(block_size=8)
    for shared in (3, 6, 4):
        finished(harness, [*PROMPT[:shared], *[(PROMPT[shared] + 1) % 97] * (9 - shared)])
    assert finished(harness, PROMPT[:8]).num_cached_tokens == 6


def test_other_salts_and_wanted_logits_take_no_part() -> None:
    harness = Harness(block_size=4)
    finished(harness, PROMPT, salt=b"a")
    assert finished(harness, [*PROMPT[:6], OTHER]).num_cached_tokens == 0
    assert finished(harness, [*PROMPT[:6], OTHER], salt=b"b").num_cached_tokens == 0
    assert (
        finished(harness, [*PROMPT[:6], OTHER], salt=b"a", prompt_logprobs=0).num_cached_tokens == 0
    )
    assert finished(harness, [*PROMPT[:6], OTHER], salt=b"a").num_cached_tokens == 6


def test_a_block_evicted_for_its_own_copy_is_copied_in_place() -> None:
    """The pool has no other block left: the content is still there when it is needed."""
    harness = Harness(block_size=4, num_kv_blocks=2)
    first = finished(harness, PROMPT[:5])  # feeds 8 tokens
    prompt = [*PROMPT[:5], (first.output_token_ids[0] + 1) % 97]
    request = harness.add(prompt, 2)
    harness.step()
    block_id = request.block_ids[1]
    assert harness.copies[-1] == [(block_id, block_id)]
    harness.run()
    assert request.num_cached_tokens == 5
    assert request.output_token_ids == alone(prompt, 2)


def test_a_failed_step_gives_the_copy_back() -> None:
    harness = Harness(block_size=4)
    finished(harness, PROMPT)

    def fail() -> None:
        raise BackendError("the step failed")

    prompt = [*PROMPT[:6], OTHER, 5]
    request = harness.add(prompt, 4)
    available = harness.engine.pool.num_available
    harness.executable.on_run = fail
    with pytest.raises(BackendError):
        harness.step()
    harness.check()
    assert harness.engine.pool.num_available == available
    harness.executable.on_run = None
    harness.run()
    assert request.num_cached_tokens == 6
    assert request.output_token_ids == alone(prompt, 4)
