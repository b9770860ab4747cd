"""A user's request from its prompt to its last output, through `LLMEngine`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo.runtime.llm_engine import LLMEngine
from octavo.runtime.sampling.sampling_params import RequestOutputKind
from tests.unit.llm_engines import (
    alone,
    assert_idle,
    complete,
    greedy,
    ids,
    letters,
    null_logprobs,
    run,
)
from tests.unit.runtime_bundles import write_text_engine
from tests.unit.runtime_harness import random_tokens

PROMPT = random_tokens(10)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_engine(tmp_path_factory.mktemp("generation") / "engine")


@pytest.fixture
def engine(bundle: Path) -> Iterator[LLMEngine]:
    loaded = LLMEngine(bundle)
    yield loaded
    loaded.close()


# Several completions


def test_n_completions_are_numbered_and_differ(engine: LLMEngine) -> None:
    output = complete(engine, PROMPT, letters(n=3, max_tokens=20))
    assert [one.index for one in output.outputs] == [0, 1, 2]
    assert len({one.text for one in output.outputs}) == 3
    assert {(len(one.token_ids), one.finish_reason) for one in output.outputs} == {(20, "length")}
    # The first of three is the one of one: each has random numbers of its own.
    assert complete(engine, PROMPT, letters(max_tokens=20)).outputs == output.outputs[:1]
    assert output.finished


def test_completions_end_one_by_one(engine: LLMEngine) -> None:
    kind = RequestOutputKind.CUMULATIVE
    params = letters(n=4, max_tokens=30, stop_token_ids=(70, 71, 72, 73), output_kind=kind)
    engine.add_request("n", ids(PROMPT), params)
    outputs = run(engine)
    lengths = [len(one.token_ids) for one in outputs[-1].outputs]
    assert len(set(lengths)) > 1
    for number, output in enumerate(outputs, 1):
        assert [len(one.token_ids) for one in output.outputs] == [min(number, n) for n in lengths]
        assert [one.finished for one in output.outputs] == [number >= n for n in lengths]
        assert output.finished == (number == max(lengths))


def test_best_of_returns_the_likeliest_in_their_order(engine: LLMEngine) -> None:
    everything = complete(engine, PROMPT, letters(n=5, max_tokens=9, stop_token_ids=(70, 71)))
    likelihoods = []
    for completion in everything.outputs:
        assert completion.cumulative_logprob is None  # no logprobs were asked for
        tokens, total = list(PROMPT), []
        for token_id in completion.token_ids:
            total.append(null_logprobs(tokens)[token_id])
            tokens.append(token_id)
        likelihoods.append(math.fsum(total))
    order = sorted(range(5), key=lambda index: -likelihoods[index])
    assert order[:2] != [0, 1]
    best = complete(engine, PROMPT, letters(n=2, best_of=5, max_tokens=9, stop_token_ids=(70, 71)))
    assert [one.index for one in best.outputs] == [0, 1]
    assert [one.token_ids for one in best.outputs] == [
        everything.outputs[index].token_ids for index in order[:2]
    ]
    assert [one.cumulative_logprob for one in best.outputs] == pytest.approx(
        [likelihoods[index] for index in order[:2]], abs=1e-6
    )
    assert [one.logprobs for one in best.outputs] == [None, None]


def test_best_of_takes_a_certain_completion(engine: LLMEngine) -> None:
    """One whose every token has probability 1: its log-probability is 0, the highest there is."""
    executable: Any = engine.engine._executable
    execute = executable.run

    def certain(inputs: object) -> Any:
        outputs = execute(inputs)
        outputs.logits[:, 70] += 1000.0
        return outputs

    executable.run = certain
    # The other tokens are sampled now and then, the certain one in most of 8 completions.
    params = letters(best_of=8, max_tokens=1, temperature=300.0, logprobs=0)
    everything = complete(engine, PROMPT, replace(params, n=8))
    tokens = [one.token_ids[0] for one in everything.outputs]
    assert 0 < tokens.count(70) < 8
    (best,) = complete(engine, PROMPT, params).outputs
    assert best.token_ids == [70]
    assert best.cumulative_logprob == 0.0


def test_best_of_shows_nothing_before_its_end(engine: LLMEngine) -> None:
    kind = RequestOutputKind.CUMULATIVE
    engine.add_request("best", ids(PROMPT), letters(best_of=3, max_tokens=5, output_kind=kind))
    assert [output.finished for output in run(engine)] == [True]


# What is shown, and when


def test_deltas_add_up_and_never_repeat(engine: LLMEngine) -> None:
    whole = complete(engine, PROMPT, letters(n=3, max_tokens=25, logprobs=1, stop=["q", "re"]))
    delta = letters(
        n=3, max_tokens=25, logprobs=1, stop=["q", "re"], output_kind=RequestOutputKind.DELTA
    )
    engine.add_request("delta", ids(PROMPT), delta)
    outputs = run(engine)
    for expected in whole.outputs:
        parts = [one for o in outputs for one in o.outputs if one.index == expected.index]
        assert "".join(part.text for part in parts) == expected.text
        assert [t for part in parts for t in part.token_ids] == expected.token_ids
        assert [row for part in parts for row in part.logprobs or ()] == expected.logprobs
        assert all(len(part.token_ids) == 1 for part in parts)
        assert [part.finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1].finish_reason == expected.finish_reason
        assert parts[-1].cumulative_logprob == expected.cumulative_logprob
    assert [output.finished for output in outputs[:-1]] == [False] * (len(outputs) - 1)


def test_only_completions_with_news_are_in_a_delta(engine: LLMEngine) -> None:
    params = letters(
        n=4, max_tokens=30, stop_token_ids=(70, 71, 72, 73), output_kind=RequestOutputKind.DELTA
    )
    engine.add_request("delta", ids(PROMPT), params)
    ended: set[int] = set()
    for output in run(engine):
        indices = {one.index for one in output.outputs}
        assert not indices & ended
        ended |= {one.index for one in output.outputs if one.finished}
    assert ended == {0, 1, 2, 3}


def test_final_only_is_one_output(engine: LLMEngine) -> None:
    engine.add_request("final", ids(PROMPT), letters(n=2, max_tokens=7))
    (output,) = run(engine)
    assert output.finished
    assert [len(one.token_ids) for one in output.outputs] == [7, 7]


# How it ends


def test_finish_and_stop_reasons(bundle: Path, tmp_path: Path) -> None:
    """A15: a length cut says "length"; EOS is a stop without a reason of its own."""
    expected = alone(PROMPT, 12)
    eos, stop = expected[9], expected[5]
    path = write_text_engine(tmp_path / "engine", eos_token_ids=[eos])
    engine = LLMEngine(path)
    cases: list[tuple[dict[str, Any], str, int | None, int]] = [
        ({"max_tokens": 12}, "stop", None, 10),
        ({"max_tokens": 12, "ignore_eos": True}, "length", None, 12),
        ({"max_tokens": 9}, "length", None, 9),
        ({"max_tokens": 12, "stop_token_ids": [stop]}, "stop", stop, 6),
        ({"max_tokens": 6, "stop_token_ids": [stop]}, "stop", stop, 6),
        ({"max_tokens": 12, "stop_token_ids": [eos], "ignore_eos": True}, "stop", eos, 10),
        ({"max_tokens": None, "ignore_eos": True}, "length", None, 54),
    ]
    for params, finish_reason, stop_reason, length in cases:
        (completion,) = complete(engine, PROMPT, greedy(**params)).outputs
        assert (completion.finish_reason, completion.stop_reason) == (finish_reason, stop_reason)
        assert completion.token_ids[:12] == expected[:length]
        assert len(completion.token_ids) == length


def test_a_stop_string_ends_the_text_before_or_behind_it(engine: LLMEngine) -> None:
    text = complete(engine, PROMPT, letters(max_tokens=30)).text
    stop = text[12:15]
    start = text.index(stop)
    for include in (False, True):
        params = letters(max_tokens=30, stop=["?", stop], include_stop_str_in_output=include)
        (completion,) = complete(engine, PROMPT, params).outputs
        assert completion.text == text[: start + 3 * include]
        assert len(completion.token_ids) == start + 3
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)


def test_what_may_become_a_stop_string_is_held_back_and_released(engine: LLMEngine) -> None:
    text = complete(engine, PROMPT, letters(max_tokens=10)).text
    params = letters(
        max_tokens=10, stop=[f"{text[3:6]}?"], output_kind=RequestOutputKind.CUMULATIVE
    )
    engine.add_request("held", ids(PROMPT), params)
    texts = [output.text for output in run(engine)]
    assert texts[:6] == [text[:1], text[:2], text[:3], text[:3], text[:3], text[:3]]
    assert texts[6:] == [text[:n] for n in range(7, 11)]


def test_min_tokens_passes_over_stop_strings(engine: LLMEngine) -> None:
    text = complete(engine, PROMPT, letters(max_tokens=40)).text
    # A letter that stands in several places.
    letter = max(text, key=text.count)
    places = [index for index, other in enumerate(text) if other == letter]
    assert len(places) >= 2
    for min_tokens in (0, places[0], places[0] + 1, places[1], places[1] + 1):
        params = letters(max_tokens=40, stop=[letter], min_tokens=min_tokens)
        (completion,) = complete(engine, PROMPT, params).outputs
        # The stop string may end in token number min_tokens + 1 or later.
        counted = [place for place in places if place + 1 > min_tokens]
        end = counted[0] if counted else 40
        assert completion.text == text[:end]
        assert completion.finish_reason == ("stop" if counted else "length")


def test_min_tokens_puts_off_the_tokens_that_end_a_request(tmp_path: Path) -> None:
    """D16: the prompt does not count, though it holds more tokens than that."""
    eos, stop = alone(PROMPT, 4)[2:]
    engine = LLMEngine(write_text_engine(tmp_path / "engine", eos_token_ids=[eos]))
    for min_tokens in (0, 2):
        params = greedy(max_tokens=9, min_tokens=min_tokens, stop_token_ids=[stop])
        (completion,) = complete(engine, PROMPT, params).outputs
        assert completion.token_ids == [*alone(PROMPT, 2), eos]
    for min_tokens in (3, 9):
        params = greedy(max_tokens=9, min_tokens=min_tokens, stop_token_ids=[stop])
        (completion,) = complete(engine, PROMPT, params).outputs
        # The null model's second choice is the id after its first.
        assert completion.token_ids[:3] == [*alone(PROMPT, 2), eos + 1]
        assert not {eos, stop} & set(completion.token_ids[:min_tokens])
    assert len(completion.token_ids) == 9


@pytest.mark.parametrize(
    "kind", [RequestOutputKind.FINAL_ONLY, RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA]
)
@pytest.mark.parametrize("include", [False, True])
def test_the_text_of_a_stop_token_is_shown_if_asked_for(
    engine: LLMEngine, kind: RequestOutputKind, include: bool
) -> None:
    free = complete(engine, PROMPT, letters(max_tokens=12)).outputs[0]
    stop = free.token_ids[7]
    end = free.token_ids.index(stop)
    params = letters(
        max_tokens=12,
        stop_token_ids=[stop],
        include_stop_str_in_output=include,
        output_kind=kind,
    )
    engine.add_request("stops", ids(PROMPT), params)
    outputs = run(engine)
    texts = [output.text for output in outputs]
    text = "".join(texts) if kind is RequestOutputKind.DELTA else texts[-1]
    assert text == free.text[: end + include]
    assert outputs[-1].outputs[0].stop_reason == stop


def test_s01_what_follows_a_stop_string_in_accepted_drafts_is_dropped(engine: LLMEngine) -> None:
    """S01, S17: neither tokens nor logprobs nor text nor the count of tokens go beyond it."""
    free = complete(engine, PROMPT, letters(max_tokens=20)).outputs[0]
    stop = free.text[2:4]
    end = free.text.index(stop) + 2
    cold = complete(engine, PROMPT, letters(max_tokens=20, stop=[stop], logprobs=1))
    engine.add_request("drafts", ids(PROMPT), letters(max_tokens=20, stop=[stop], logprobs=1))
    engine.step()
    before = engine.metrics()["generation_tokens"]
    (request,) = engine.engine.scheduler.running
    request.set_drafts(free.token_ids[1:9])
    outputs = engine.step()
    assert_idle(engine)
    assert outputs[0].outputs == cold.outputs
    assert outputs[0].outputs[0].token_ids == free.token_ids[:end]
    assert len(outputs[0].outputs[0].logprobs or ()) == end
    assert engine.metrics()["generation_tokens"] - before == end - 1


def test_rejected_drafts_leave_no_trace(engine: LLMEngine) -> None:
    params = letters(max_tokens=12, logprobs=1, frequency_penalty=1.0)
    cold = complete(engine, PROMPT, params)
    engine.add_request("drafts", ids(PROMPT), params)
    outputs = engine.step()
    while engine.has_unfinished_requests:
        (request,) = engine.engine.scheduler.running
        known = request.num_output_tokens
        drafts = cold.outputs[0].token_ids[known : known + 3]
        if len(drafts) == 3:
            request.set_drafts([*drafts[:2], drafts[2] + 1])
        outputs += engine.step()
    assert outputs[0].outputs == cold.outputs
