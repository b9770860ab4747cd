"""Requests that are refused, fail alone or are aborted, through `LLMEngine`: others go on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.graphs.errors import BackendError, QueueFullError, RequestError
from octavo.runtime import LLM, SamplingParams
from octavo.runtime.llm_engine import LLMEngine
from octavo.runtime.sampling.beam_search import BeamSearchParams
from octavo.runtime.sampling.sampling_params import RequestOutputKind
from tests.unit.llm_engines import (
    alone,
    by_id,
    complete,
    greedy,
    ids,
    letters,
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


class FailsAt:
    def __init__(self, count: int) -> None:
        self._count = count

    def __call__(self, row: Any) -> None:
        if len(row.output_token_ids) == self._count:
            raise ValueError("no more")


class FailsOn:
    def __init__(self, output: list[int]) -> None:
        self._output = output

    def __call__(self, row: Any) -> None:
        if row.output_token_ids.tolist() == self._output:
            raise ValueError("no more")


@pytest.mark.parametrize("count", [0, 3])
def test_an_error_of_one_request_leaves_the_others_alone(engine: LLMEngine, count: int) -> None:
    cold = complete(engine, PROMPT, letters(n=2, max_tokens=8))
    engine.add_request("well", ids(PROMPT), letters(n=2, max_tokens=8))
    failing = letters(n=2, max_tokens=8, logits_processors=[FailsAt(count)], prompt_logprobs=1)
    engine.add_request("failing", ids(PROMPT), failing)
    outputs = by_id(run(engine))
    assert outputs["well"][0].outputs == cold.outputs
    (failed,) = outputs["failing"]
    assert failed.finished
    assert isinstance(failed.error, RequestError)
    assert "the logits processor FailsAt failed (ValueError: no more)" in str(failed.error)
    assert "error" in {one.finish_reason for one in failed.outputs}
    assert [len(one.token_ids) for one in failed.outputs] == [count, count]
    with pytest.raises(RequestError, match="no more"):
        raise failed.error


@pytest.mark.parametrize("is_accepted", [True, False])
def test_an_error_behind_drafts_counts_only_where_they_lead(
    engine: LLMEngine, is_accepted: bool
) -> None:
    """The row behind a draft is not looked at if the draft ends the request, or is rejected."""
    free = alone(PROMPT, 4)
    draft = free[1] if is_accepted else free[1] + 1
    fails = FailsOn([free[0], draft])
    params = greedy(
        max_tokens=4, logits_processors=[fails], stop_token_ids=[free[1]] if is_accepted else []
    )
    cold = complete(engine, PROMPT, params)
    assert cold.error is None
    engine.add_request("drafts", ids(PROMPT), params)
    engine.step()
    (request,) = engine.engine.scheduler.running
    request.set_drafts([draft])
    (output,) = run(engine)
    assert output.error is None
    assert output.outputs == cold.outputs


def test_llm_raises_the_error_and_ends_the_other_prompts(bundle: Path) -> None:
    with LLM(bundle) as llm:
        params = [letters(), letters(logits_processors=[FailsAt(1)])]
        with pytest.raises(RequestError, match="no more"):
            llm.generate([ids(PROMPT), ids(PROMPT)], params)
        assert not llm.engine.has_unfinished_requests
        with pytest.raises(RequestError, match="no more"):
            list(llm.stream(ids(PROMPT), params[1]))
        assert llm.generate(ids(PROMPT), greedy(max_tokens=4))[0].outputs[0].token_ids == alone(
            PROMPT, 4
        )


@pytest.mark.parametrize("num_steps", range(10))
@pytest.mark.parametrize("max_num_seqs", [1, 2, 4])
def test_abort_at_every_stage(bundle: Path, max_num_seqs: int, num_steps: int) -> None:
    """In the queue, in the prompt's chunks, with followers that wait, run or have ended.

    A18: an abort with logprobs is like any other.
    """
    engine = LLMEngine(bundle, max_num_seqs=max_num_seqs, max_num_batched_tokens=4)
    kind = RequestOutputKind.CUMULATIVE
    params = letters(
        n=3, max_tokens=9, logprobs=2, prompt_logprobs=2, output_kind=kind, stop_token_ids=(70, 80)
    )
    for name in ("aborted", "stays"):
        engine.add_request(name, ids(PROMPT), params)
    engine.add_request("beams", ids(PROMPT), BeamSearchParams(beam_width=1, max_tokens=4))
    outputs = [output for _ in range(num_steps) for output in engine.step()]
    assert engine.abort_request("aborted")
    assert not engine.abort_request("aborted")
    outputs += run(engine)
    assert not any(output.finished for output in by_id(outputs).get("aborted", []))
    # Its name is free again.
    engine.add_request("aborted", ids(PROMPT), params)
    (*_, again) = run(engine)
    stays = by_id(outputs)["stays"][-1]
    assert stays.outputs == again.outputs
    assert stays.prompt_logprobs == again.prompt_logprobs


@pytest.mark.parametrize("num_steps", range(7))
def test_abort_of_a_beam_search_at_every_stage(bundle: Path, num_steps: int) -> None:
    engine = LLMEngine(bundle, max_num_seqs=4, max_num_batched_tokens=5)
    params = BeamSearchParams(beam_width=4, max_tokens=6)
    expected = complete(engine, PROMPT, params)
    for name in ("aborted", "stays"):
        engine.add_request(name, ids(PROMPT), params)
    for _ in range(num_steps):
        assert not engine.step()
    assert engine.abort_request("aborted")
    (output,) = run(engine)
    assert output.outputs == expected.outputs
    assert engine.metrics()["request_success"]["abort"] == 1


def test_a18_a_stream_with_logprobs_can_be_closed(bundle: Path) -> None:
    with LLM(bundle) as llm:
        params = SamplingParams(n=2, logprobs=3, prompt_logprobs=3, max_tokens=30, seed=1)
        stream = llm.stream(ids(PROMPT), params)
        next(stream)
        next(stream)
        stream.close()
        assert not llm.engine.has_unfinished_requests
        assert llm.engine.pool.num_available == llm.engine.pool.num_blocks


# What is refused


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        (lambda: SamplingParams(logit_bias={257: 1.0}), "token id 257 in logit_bias lies outside"),
        (lambda: SamplingParams(logit_bias={"257": 1}), "token id 257 in logit_bias lies outside"),  # type: ignore[dict-item]
        (lambda: SamplingParams(stop_token_ids=[999]), "token id 999 in stop_token_ids"),
        (lambda: SamplingParams(allowed_token_ids=[257]), "token id 257 in allowed_token_ids"),
        (lambda: SamplingParams(logprobs=258), "logprobs is 258, the vocabulary has 257"),
        (lambda: SamplingParams(top_p=math.nan), "top_p is nan"),
        (lambda: SamplingParams(temperature=math.inf), "temperature is inf"),
    ],
)
def test_a04_a11_bad_parameters_are_refused_and_the_engine_lives(
    bundle: Path, params: Callable[[], SamplingParams], sentence: str
) -> None:
    """A04 an id outside the vocabulary, A11 NaN."""
    with LLM(bundle) as llm:
        running = llm.stream(ids(PROMPT), SamplingParams(temperature=0, max_tokens=5))
        next(running)
        with pytest.raises(RequestError, match=sentence):
            llm.generate([ids(PROMPT), ids(PROMPT)], params())
        assert list(running)[-1].outputs[0].token_ids == alone(PROMPT, 5)
        assert not llm.engine.has_unfinished_requests


def test_a02_an_overlong_prompt_is_refused_at_once(engine: LLMEngine) -> None:
    engine.add_request("first", ids(PROMPT), greedy(max_tokens=3))
    with pytest.raises(RequestError, match="the prompt has 64 tokens, the engine takes at most 63"):
        engine.add_request("long", ids([1] * 64), greedy())
    (output,) = run(engine)
    assert output.outputs[0].token_ids == alone(PROMPT, 3)


def test_names_may_look_like_those_of_sequences(engine: LLMEngine) -> None:
    params = letters(n=3, max_tokens=6)
    beams = BeamSearchParams(beam_width=2, max_tokens=6)
    expected = complete(engine, PROMPT, params).outputs
    expected_beams = complete(engine, PROMPT, beams).outputs
    for name in ("a", "a/1", "a/2"):
        engine.add_request(name, ids(PROMPT), params)
    for name in ("b", "b/beam 1"):
        engine.add_request(name, ids(PROMPT), beams)
    outputs = run(engine)
    assert {o.request_id: o.outputs for o in outputs} == {
        **dict.fromkeys(("a", "a/1", "a/2"), expected),
        **dict.fromkeys(("b", "b/beam 1"), expected_beams),
    }
    engine.add_request("a", ids(PROMPT), params)
    with pytest.raises(RequestError, match="'a' is still open: give each its own id"):
        engine.add_request("a", ids(PROMPT), params)
    run(engine)


def test_priorities_need_the_policy(bundle: Path, engine: LLMEngine) -> None:
    with pytest.raises(RequestError, match='set scheduling_policy="priority"'):
        engine.add_request("a", ids(PROMPT), priority=1)
    for priority in ("1", 1.0, True):
        other = LLMEngine(bundle, scheduling_policy="priority")
        with pytest.raises(RequestError, match="it must be an integer"):
            other.add_request("a", ids(PROMPT), priority=priority)  # type: ignore[arg-type]
    with LLM(bundle, scheduling_policy="priority", max_num_seqs=1) as llm:
        stream = llm.stream(ids(PROMPT), greedy(max_tokens=9), priority=-1)
        outputs = llm.generate([ids(PROMPT)] * 3, greedy(max_tokens=2), priority=[3, 1, 2])
        waits = [output.metrics.queue_time or 0.0 for output in outputs]
        assert waits[1] < waits[2] < waits[0]
        stream.close()


def test_a_failed_step_can_be_tried_again(engine: LLMEngine) -> None:
    cold = complete(engine, PROMPT, letters(n=3, max_tokens=6)).outputs
    executable: Any = engine.engine._executable
    execute = executable.run
    engine.add_request("again", ids(PROMPT), letters(n=3, max_tokens=6))

    def fail(inputs: object) -> None:
        execute(inputs)
        raise BackendError("the step failed")

    outputs = []
    while engine.has_unfinished_requests:
        executable.run = fail
        with pytest.raises(BackendError):
            engine.step()
        executable.run = execute
        outputs += engine.step()
    assert [output.outputs for output in outputs] == [cold]


def test_a_full_queue_starts_no_prompt_of_a_call(bundle: Path) -> None:
    with LLM(bundle, max_num_waiting=2, max_num_seqs=1) as llm:
        with pytest.raises(QueueFullError, match="2 requests are waiting, max_num_waiting is 2"):
            llm.generate([ids(PROMPT)] * 4, greedy(max_tokens=2))
        assert not llm.engine.has_unfinished_requests
        outputs = llm.generate([ids(PROMPT)] * 3, greedy(max_tokens=2))
        assert [output.outputs[0].token_ids for output in outputs] == [alone(PROMPT, 2)] * 3
