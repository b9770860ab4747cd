"""The public API on null engines."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.backends.base import StepInputs
from octavo.backends.null import expected_next_token
from octavo.graphs.errors import (
    BackendError,
    CapacityError,
    RequestError,
)
from octavo.runtime import LLM, SamplingParams
from tests.unit.runtime_bundles import VOCAB_SIZE, write_text_engine

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_engine(tmp_path_factory.mktemp("llm") / "engine")


@pytest.fixture(scope="module")
def llm(engine: Path) -> Iterator[LLM]:
    with LLM(engine) as loaded:
        yield loaded


def ids(*token_ids: Any) -> dict[str, object]:
    return {"prompt_token_ids": list(token_ids)}


def assert_idle(llm: LLM) -> None:
    assert not llm.engine.has_unfinished_requests
    assert llm.engine.pool.num_available == llm.engine.pool.num_blocks


def alone(prompt: list[int], count: int, vocab_size: int = VOCAB_SIZE) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(expected_next_token(tokens, vocab_size))
    return tokens[len(prompt) :]


def test_prompts_of_every_kind_come_back_in_order(llm: LLM) -> None:
    encoded = llm.get_tokenizer().encode("ab")
    prompts: list[Any] = ["ab", {"prompt": "abc"}, ids(5, 6), {"prompt": "x", **ids(7)}] * 2
    outputs = llm.generate(prompts, GREEDY)
    assert [output.prompt for output in outputs] == ["ab", "abc", None, "x"] * 2
    assert [o.prompt_token_ids for o in outputs[2:4]] == [[5, 6], [7]]
    assert outputs[0].prompt_token_ids == encoded
    for output in outputs:
        (completion,) = output.outputs
        assert completion.token_ids == alone(output.prompt_token_ids, 8)
        assert completion.text == output.text == llm.get_tokenizer().decode(completion.token_ids)
        assert (completion.index, completion.finish_reason) == (0, "length")
        assert output.finished
        assert completion.finished
    assert len({output.request_id for output in outputs}) == 8


def test_a_single_prompt_and_default_parameters(llm: LLM) -> None:
    (output,) = llm.generate("ab")
    assert len(output.outputs[0].token_ids) == 16
    (output,) = llm.generate(ids(1), None)
    assert len(output.outputs[0].token_ids) == 16


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, seed=n) for n in (1, 2, 3)]
    outputs = llm.generate([ids(1), ids(2), ids(3)], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3]
    with pytest.raises(RequestError, match="there are 3 sampling_params for 1 prompts"):
        llm.generate(ids(1), params)
    with pytest.raises(RequestError, match="give SamplingParams"):
        llm.generate(ids(1), [{"max_tokens": 3}])  # type: ignore[list-item]


def test_numpy_ids_and_no_prompts(llm: LLM) -> None:
    (output,) = llm.generate({"prompt_token_ids": np.array([4, 5])}, GREEDY)
    assert output.prompt_token_ids == [4, 5]
    assert llm.generate([], GREEDY) == []


def test_e06_a_second_call_keeps_the_results_of_the_first(llm: LLM) -> None:
    first = llm.generate([ids(1, 2), ids(3)], GREEDY)
    copy = [list(output.outputs[0].token_ids) for output in first]
    second = llm.generate([ids(9, 8), ids(7)], GREEDY)
    assert [output.outputs[0].token_ids for output in first] == copy
    assert second[0].outputs[0].token_ids == alone([9, 8], 8)
    assert {o.request_id for o in first}.isdisjoint(o.request_id for o in second)


def test_equal_seeds_give_equal_tokens_and_none_gives_others(llm: LLM) -> None:
    seeded = SamplingParams(temperature=2.0, max_tokens=30, seed=11)
    same = llm.generate([ids(5), ids(5)], seeded)
    assert same[0].outputs[0].token_ids == same[1].outputs[0].token_ids
    free = llm.generate([ids(5), ids(5)], SamplingParams(temperature=2.0, max_tokens=30))
    assert free[0].outputs[0].token_ids != free[1].outputs[0].token_ids


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ("", "the prompt is empty"),
        (ids(), "the prompt is empty"),
        ({"prompt": ""}, "the prompt is empty"),
        ({}, "must be a text"),
        ({"tokens": [1]}, "must be a text"),
        (17, "must be a text"),
        ({"prompt": 5}, '"prompt" is 5, it must be a text'),
        ({"prompt_token_ids": "abc"}, "it must be a list of token ids"),
        ({"prompt_token_ids": 3}, "it must be a list of token ids"),
        (ids(1, -1), r"the token id -1, ids must lie in \[0, 257\)"),
        (ids(VOCAB_SIZE), r"the token id 257, ids must lie in \[0, 257\)"),
        (ids(1 << 40), "ids must lie in"),
        (ids(1, 2.0), "holds 2.0, token ids must be integers"),
        (ids(True), "holds True, token ids must be integers"),
        (ids("1"), "holds '1', token ids must be integers"),
        (ids(*[1] * 64), "the prompt has 64 tokens, the engine takes at most 63 .* 64"),
        ("x" * 65, "the prompt has 65 tokens, the engine takes at most 63"),
    ],
)
def test_a01_a02_bad_prompts_are_refused_before_any_starts(
    llm: LLM, prompt: Any, sentence: str
) -> None:
    """A01 empty, A02 overlong; the engine lives on."""
    with pytest.raises(RequestError, match=f"prompt 1 of 3: .*{sentence}"):
        llm.generate([ids(1), prompt, ids(2)], GREEDY)
    assert not llm.engine.has_unfinished_requests
    with pytest.raises(RequestError, match=sentence):
        llm.stream(prompt, GREEDY)
    assert llm.generate(ids(1), GREEDY)[0].outputs[0].token_ids == alone([1], 8)


def test_prompts_that_are_no_list(llm: LLM) -> None:
    with pytest.raises(RequestError, match="prompts are of type int"):
        llm.generate(5, GREEDY)  # type: ignore[arg-type]


def test_a03_b02_prompts_around_the_models_length(llm: LLM) -> None:
    """A03, B02: one less gives one token, exactly and one more are refused."""
    (output,) = llm.generate(ids(*[3] * 63), SamplingParams(temperature=0, max_tokens=None))
    assert output.outputs[0].token_ids == alone([3] * 63, 1)
    assert output.outputs[0].finish_reason == "length"
    for length in (64, 65):
        with pytest.raises(RequestError, match=f"the prompt has {length} tokens"):
            llm.generate(ids(*[3] * length), GREEDY)


def test_p12_a_prompt_that_never_fits_the_pool_is_refused(engine: Path) -> None:
    with LLM(engine, num_kv_blocks=3) as llm:
        with pytest.raises(CapacityError, match="need 5 cache blocks, the pool has 3"):
            llm.generate([ids(1), ids(*range(13))], GREEDY)
        assert not llm.engine.has_unfinished_requests
        assert len(llm.generate(ids(1, 2, 3, 4), GREEDY)[0].outputs[0].token_ids) == 8


def test_text_leaves_out_the_token_that_stopped_it(llm: LLM) -> None:
    expected = alone([1, 2], 8)
    params = SamplingParams(temperature=0, max_tokens=8, stop_token_ids=(expected[3],))
    first = expected.index(expected[3])
    (output,) = llm.generate(ids(1, 2), params)
    completion = output.outputs[0]
    assert completion.token_ids == expected[: first + 1]
    assert completion.text == llm.get_tokenizer().decode(expected[:first])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", expected[3])
    streamed = list(llm.stream(ids(1, 2), params))
    assert streamed[-1].outputs == output.outputs


def test_a_stream_accumulates_to_the_whole_output(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=40)
    (whole,) = llm.generate("hello", params)
    streamed = list(llm.stream("hello", params))
    assert [len(o.outputs[0].token_ids) for o in streamed] == list(range(1, 41))
    assert [o.finished for o in streamed] == [False] * 39 + [True]
    for earlier, later in pairwise(streamed):
        assert later.text.startswith(earlier.text)
    assert streamed[-1].outputs == whole.outputs


def test_streams_and_generate_share_the_engine(llm: LLM) -> None:
    streams = [llm.stream(ids(i), GREEDY) for i in (1, 2)]
    seen = [next(stream) for stream in streams]
    (output,) = llm.generate(ids(3), SamplingParams(temperature=0, max_tokens=20))
    for number, stream in enumerate(streams, 1):
        seen = list(stream)
        assert seen[-1].outputs[0].token_ids == alone([number], 8)
    assert output.outputs[0].token_ids == alone([3], 20)
    assert not llm.engine.has_unfinished_requests


def test_closing_a_stream_aborts_its_request(llm: LLM) -> None:
    stream = llm.stream(ids(1, 2, 3), SamplingParams(max_tokens=40))
    next(stream)
    assert llm.engine.has_unfinished_requests
    stream.close()
    assert_idle(llm)
    never_started = llm.stream(ids(1, 2, 3))
    del never_started
    assert_idle(llm)


@pytest.mark.parametrize("error", [KeyboardInterrupt, BackendError("no memory")])
def test_an_interrupted_generate_leaves_a_usable_llm(engine: Path, error: Any) -> None:
    with LLM(engine) as llm:
        run = llm.engine._executable.run
        steps = 0

        def failing(inputs: StepInputs) -> object:
            nonlocal steps
            steps += 1
            if steps == 3:
                raise error
            return run(inputs)

        llm.engine._executable.run = failing  # type: ignore[method-assign, assignment]
        with pytest.raises(type(error) if isinstance(error, Exception) else error):
            llm.generate([ids(1, 2), ids(3)], GREEDY)
        assert_idle(llm)
        assert llm.generate(ids(1, 2), GREEDY)[0].outputs[0].token_ids == alone([1, 2], 8)


def test_cached_tokens_and_metrics_are_reported(engine: Path) -> None:
    prompt = ids(*range(20, 41))
    with LLM(engine) as llm:
        cold, hit = (llm.generate(prompt, GREEDY)[0] for _ in range(2))
    with LLM(engine, enable_prefix_caching=False) as llm:
        off = [llm.generate(prompt, GREEDY)[0] for _ in range(2)][1]
    assert [o.num_cached_tokens for o in (cold, hit, off)] == [0, 20, 0]
    assert hit.metrics.num_cached_tokens == 20
    assert cold.outputs == hit.outputs == off.outputs
    for value in (
        hit.metrics.queue_time,
        hit.metrics.time_to_first_token,
        hit.metrics.time_per_output_token,
        hit.metrics.total_time,
    ):
        assert value is not None
        assert 0 <= value < 5


def test_an_engine_without_a_tokenizer_serves_token_ids(null_engine: Path) -> None:
    with LLM(null_engine) as llm:
        (output,) = llm.generate(ids(1, 2), GREEDY)
        assert output.outputs[0].token_ids == alone([1, 2], 8, vocab_size=97)
        assert output.text == ""
        assert list(llm.stream(ids(1, 2), GREEDY))[-1].outputs == output.outputs
        with pytest.raises(RequestError, match="no tokenizer and cannot read a text prompt"):
            llm.generate("ab")
        with pytest.raises(RequestError, match="serves token ids only"):
            llm.get_tokenizer()


def test_chat_template(llm: LLM) -> None:
    assert llm.apply_chat_template([{"role": "user", "content": "Hi"}]) == "<s>Hi!"


def test_a_lowered_limit_shows_in_the_steps(engine: Path) -> None:
    with LLM(engine, max_num_seqs=2, max_num_batched_tokens=5, num_threads=1) as llm:
        sizes = []
        run = llm.engine._executable.run

        def recording(inputs: StepInputs) -> object:
            sizes.append((len(inputs.prefix_offsets), len(inputs.token_ids)))
            return run(inputs)

        llm.engine._executable.run = recording  # type: ignore[method-assign, assignment]
        outputs = llm.generate([ids(*range(i, 12)) for i in range(3)], GREEDY)
    assert max(seqs for seqs, _ in sizes) == 2
    assert max(tokens for _, tokens in sizes) == 5
    assert [o.outputs[0].token_ids for o in outputs] == [
        alone(list(range(i, 12)), 8) for i in range(3)
    ]
