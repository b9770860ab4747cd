"""Faults of other engines, as cases: "Speculation", with drafters on the null backend."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.runtime.llm_engine import LLMEngine
from octavo.runtime.request import Request
from octavo.runtime.speculation.ngram import NgramDrafter
from tests.unit.drafters import FailingDrafter, ScriptedDrafter, speculate
from tests.unit.llm_engines import alone, complete, greedy, ids, letters
from tests.unit.runtime_bundles import VOCAB_SIZE, write_text_engine
from tests.unit.runtime_harness import Harness, random_tokens
from tests.unit.runtime_harness import alone as continued

PROMPT = [ord(character) for character in "hello"]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[LLMEngine]:
    made = LLMEngine(write_text_engine(tmp_path / "engine"))
    yield made
    made.close()


def truth(request: Request, most: int) -> list[int]:
    return alone(request.tokens(0, request.num_tokens).tolist(), most)


def half_true(request: Request, most: int) -> list[int]:
    drafts = truth(request, most)
    return [*drafts[:2], *((token + 1) % VOCAB_SIZE for token in drafts[2:])]


def lie(request: Request, most: int) -> list[int]:
    return [(token + 1) % VOCAB_SIZE for token in truth(request, most)]


SAYINGS = [truth, half_true, lie, lambda request, most: (), lambda request, most: [0]]
PARAMS = {
    "greedy": greedy(max_tokens=20),
    "penalties": greedy(max_tokens=20, frequency_penalty=1.5, presence_penalty=0.5),
    "repetition": greedy(max_tokens=20, repetition_penalty=1.7),
    "bias": greedy(max_tokens=20, logit_bias={65: 9.0, 70: 8.5}, min_tokens=3),
    "random": letters(max_tokens=20),
    "cut": letters(max_tokens=20, top_k=7, top_p=0.8, min_p=0.05, temperature=1.4),
}


@pytest.mark.parametrize("says", SAYINGS)
@pytest.mark.parametrize("name", PARAMS)
def test_s08_drafts_change_nothing_whatever_the_parameters(
    engine: LLMEngine, says: object, name: str
) -> None:
    """TRT-LLM#17701: penalties, bias and cuts are applied, in every row with its own history."""
    params = dataclasses.replace(PARAMS[name], logprobs=3)
    wanted = complete(engine, PROMPT, params).outputs
    speculator = speculate(engine.engine, ScriptedDrafter(says))  # type: ignore[arg-type]
    found = complete(engine, PROMPT, params).outputs
    assert found == wanted
    if says is truth and name == "greedy":
        assert speculator.counts.num_accepted_tokens == speculator.counts.num_draft_tokens == 15


def test_s04_every_token_of_a_step_counts_for_penalties(engine: LLMEngine) -> None:
    """sglang#33643: a step of several tokens is not one token of the history.

    With a penalty that forbids a token once it was said, no letter may come twice.
    """
    params = letters(max_tokens=20, frequency_penalty=2.0, presence_penalty=2.0, temperature=0.01)
    speculator = speculate(engine.engine, ScriptedDrafter(lambda r, most: [70] * most))
    wanted = complete(engine, PROMPT, dataclasses.replace(params, speculate=False))
    found = complete(engine, PROMPT, params)
    assert found.outputs == wanted.outputs
    assert speculator.counts.num_draft_tokens > 0


def test_s07_a_bias_reaches_every_row(engine: LLMEngine) -> None:
    """vllm#42744: not the row after the last draft alone. All tokens are the biased one."""
    params = greedy(max_tokens=12, logit_bias={71: 100.0})
    speculator = speculate(engine.engine, ScriptedDrafter(lambda r, most: [71] * most))
    found = complete(engine, PROMPT, params)
    assert found.outputs[0].token_ids == [71] * 12
    assert speculator.counts.num_accepted_tokens == speculator.counts.num_draft_tokens > 0


def test_s09_accepted_tokens_have_the_targets_logprobs(engine: LLMEngine) -> None:
    """vllm#17876, llama.cpp#27972: none is 0.0, each is that of a run without drafts."""
    params = greedy(max_tokens=16, logprobs=2)
    wanted = complete(engine, PROMPT, params).outputs[0].logprobs
    speculator = speculate(engine.engine, ScriptedDrafter(truth))
    found = complete(engine, PROMPT, params).outputs[0].logprobs
    assert found == wanted
    assert speculator.counts.num_accepted_tokens == 12
    for position in found or ():
        assert all(row.logprob < 0 for row in position.values())


def test_s01_an_accepted_run_ends_at_its_stop_token() -> None:
    """sglang#31599: [10, 11, STOP, 20, 21, 22] with a budget of 5 ends on the stop, three long."""
    harness = Harness()
    prompt = random_tokens(9)
    run = continued(prompt, 6)
    speculator = speculate(
        harness.engine, ScriptedDrafter(lambda r, most: continued(_all(r), most)), num_tokens=5
    )
    request = harness.add(prompt, max_tokens=5, stop_token_ids=[run[2]])
    harness.run()
    assert request.output_token_ids == run[:3]
    assert (request.finish_reason, request.stop_reason) == ("stop", run[2])
    assert speculator.counts.num_draft_tokens == 3  # as many as the length leaves room for


def _all(request: Request) -> list[int]:
    return [*request.prompt_token_ids, *request.output_token_ids]


def test_s17_usage_counts_what_was_emitted_alone() -> None:
    """sglang#39826: what lies behind an accepted end was computed, and is counted nowhere."""
    harness = Harness()
    prompt = random_tokens(9)
    run = continued(prompt, 6)
    speculate(harness.engine, ScriptedDrafter(lambda r, most: continued(_all(r), most)))
    request = harness.add(prompt, max_tokens=20, eos_token_ids=[run[2]])
    harness.run()
    assert [len(step.token_ids) for step in harness.steps] == [9, 5]
    assert request.num_output_tokens == 3
    assert harness.engine.snapshot()["generation_tokens"] == 3


def test_s03_the_target_decides_where_a_sequence_ends() -> None:
    """openvino.genai#3293: a drafted end of the sequence is a draft like any other."""
    harness = Harness()
    prompt = random_tokens(9)
    run = continued(prompt, 8)
    end = next(token for token in range(97) if token not in run)
    speculate(harness.engine, ScriptedDrafter(lambda request, most: [end] * most))
    request = harness.add(prompt, max_tokens=8, eos_token_ids=[end])
    harness.run()
    assert request.output_token_ids == run
    assert request.finish_reason == "length"


def test_s10_prompt_logprobs_are_not_touched_by_drafts(engine: LLMEngine) -> None:
    """vllm#53488."""
    params = greedy(max_tokens=9, prompt_logprobs=2, logprobs=1)
    wanted = complete(engine, list(range(40)), params)
    speculate(engine.engine, ScriptedDrafter(half_true))
    found = complete(engine, list(range(40)), params)
    assert found.prompt_logprobs == wanted.prompt_logprobs
    assert found.outputs == wanted.outputs


def test_s12_two_engines_accept_the_same() -> None:
    """vllm#17498: nothing but a request's own tokens and parameters decides."""
    seen = []
    for others in (0, 3):
        harness = Harness(max_num_batched_tokens=24)
        drafter = ScriptedDrafter(
            lambda r, most: [*continued(_all(r), most)[:2], *[1] * max(most - 2, 0)]
        )
        speculate(harness.engine, drafter)
        request = harness.add(random_tokens(9), max_tokens=30)
        for seed in range(others):
            harness.add(random_tokens(20, seed=seed + 5), max_tokens=30)
        harness.run()
        seen.append(request.output_token_ids)
    assert seen[0] == seen[1] == continued(random_tokens(9), 30)


@pytest.mark.parametrize("length", [57, 58, 59, 60, 63])
def test_s13_drafts_never_pass_the_models_length(length: int) -> None:
    """vllm#42533: the null backend refuses a position beyond max_model_len."""
    harness = Harness(max_model_len=64)
    drafter = ScriptedDrafter(lambda r, most: continued(_all(r), most))
    speculate(harness.engine, drafter, num_tokens=8)
    prompt = random_tokens(length)
    request = harness.add(prompt, max_tokens=None)
    harness.run()
    assert request.num_tokens == 64
    assert request.output_token_ids == continued(prompt, 64 - length)
    assert all(len(prompt) + 1 + asked < 64 for asked in drafter.asked[:1])


def test_s15_ngrams_leave_markup_as_it_is(engine: LLMEngine) -> None:
    """vllm#40875: the same text with drafts from the prompt's own tags as without."""
    prompt = [ord(c) for c in "<a><b>x</b></a><a><b>y</b></a>"]
    params = letters(max_tokens=30, allowed_token_ids=[ord(c) for c in "<>/abxy"])
    wanted = complete(engine, prompt, params)
    drafter = NgramDrafter(2, 4, sampled_vocab_size=VOCAB_SIZE)
    speculator = speculate(engine.engine, drafter)
    found = complete(engine, prompt, params)
    assert found.outputs == wanted.outputs
    assert speculator.counts.num_draft_tokens > 0


def test_one_sampled_token_and_four_drafts_are_one_step_of_five() -> None:
    """The design's example: five rows of logits, positions that follow, slots of one block."""
    harness = Harness()
    speculate(harness.engine, ScriptedDrafter(lambda r, most: continued(_all(r), most)))
    prompt = random_tokens(6)
    request = harness.add(prompt, max_tokens=6)
    harness.run()
    run = continued(prompt, 6)
    assert request.output_token_ids == run
    prefill, verify = harness.steps
    assert prefill.token_ids.tolist() == prompt
    assert prefill.logits_indices.tolist() == [5]
    assert verify.token_ids.tolist() == run[:5]
    assert verify.positions.tolist() == [6, 7, 8, 9, 10]
    assert verify.query_start_loc.tolist() == [0, 5]
    assert verify.prefix_offsets.tolist() == [6]
    assert verify.logits_indices.tolist() == [0, 1, 2, 3, 4]
    (block,) = set((verify.slot_mapping // 16).tolist())
    assert verify.slot_mapping.tolist() == [block * 16 + offset for offset in range(6, 11)]


def test_the_first_drafter_that_finds_anything_wins() -> None:
    harness = Harness()
    asked: list[int] = []

    def second(request: Request, most: int) -> list[int]:
        asked.append(request.num_output_tokens)
        return continued(_all(request), most)

    first = ScriptedDrafter(
        lambda r, most: continued(_all(r), most) if r.num_output_tokens == 1 else (), "first"
    )
    other = ScriptedDrafter(second, "second")
    speculate(harness.engine, first, other)
    prompt = random_tokens(9)
    request = harness.add(prompt, max_tokens=12)
    harness.run()
    assert request.output_token_ids == continued(prompt, 12)
    assert asked == [6]  # the first one had drafted after token 1, and nobody may after 11
    assert first.num_steps == other.num_steps == len(harness.steps)


def test_a_drafter_that_fails_is_turned_off_and_nobody_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    harness = Harness()
    broken = FailingDrafter(after=2)
    well = ScriptedDrafter(lambda r, most: continued(_all(r), most), "well")
    speculator = speculate(harness.engine, broken, well)
    prompt = random_tokens(9)
    request = harness.add(prompt, max_tokens=30)
    harness.run()
    assert request.output_token_ids == continued(prompt, 30)
    assert broken.is_closed
    assert speculator.methods == ("well",)
    assert harness.engine.snapshot()["spec_decode_num_failures"] == 1
    assert "'scripted' failed and is off from now on" in caplog.text


def test_a_request_may_go_without_drafts() -> None:
    harness = Harness()
    drafter = ScriptedDrafter(lambda r, most: continued(_all(r), most))
    speculate(harness.engine, drafter)
    prompt = random_tokens(9)
    request = harness.add(prompt, max_tokens=8, speculate=False)
    harness.run()
    assert request.output_token_ids == continued(prompt, 8)
    assert drafter.asked == []
    assert len(harness.steps) == 8


def test_drafts_give_way_to_other_requests_tokens() -> None:
    """A step of six tokens: two sequences decode in each, whatever one would like to draft."""
    harness = Harness(max_num_batched_tokens=6)
    speculate(harness.engine, ScriptedDrafter(lambda r, most: continued(_all(r), most)))
    prompts = [random_tokens(3, seed=1), random_tokens(3, seed=2)]
    requests = [harness.add(prompt, max_tokens=15) for prompt in prompts]
    while harness.engine.has_unfinished_requests:
        before = [request.num_tokens for request in requests]
        harness.step()
        for request, count in zip(requests, before, strict=True):
            assert request.finished or request.num_tokens > count
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.output_token_ids == continued(prompt, 15)


def test_a_drafter_keeps_nothing_of_requests_that_are_gone() -> None:
    harness = Harness()
    drafter = NgramDrafter(1, 4, sampled_vocab_size=97)
    speculate(harness.engine, drafter, adaptive=True)
    gone = weakref.ref(harness.add([1, 2, 1, 2, 1, 2], max_tokens=20))
    kept = harness.add([3, 4, 3, 4], max_tokens=200)
    while (request := gone()) is not None and not request.finished:
        del request
        harness.step()
    del request
    gc.collect()
    assert gone() is None
    harness.engine.abort(kept)


def test_a_failed_step_leaves_drafts_to_the_next() -> None:
    harness = Harness()
    speculate(harness.engine, ScriptedDrafter(lambda r, most: continued(_all(r), most)))
    prompt = random_tokens(9)
    request = harness.add(prompt, max_tokens=11)
    harness.step()

    def fail() -> None:
        raise RuntimeError("a step failed")

    harness.executable.on_run = fail
    with pytest.raises(RuntimeError, match="a step failed"):
        harness.engine.step()
    assert request.num_drafts == 4
    harness.executable.on_run = None
    harness.run()
    assert request.output_token_ids == continued(prompt, 11)


def test_speculation_is_off_where_nobody_asked_for_it(engine: LLMEngine) -> None:
    assert engine.engine.speculator is None
    complete(engine, PROMPT, greedy(max_tokens=3))
    assert engine.metrics()["spec_decode_num_drafts"] == 0
    assert ids(PROMPT)["prompt_token_ids"] == PROMPT
