"""Requests of Triton, from their tensors to prompts and sampling parameters, and back."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from octavo.graphs.errors import RequestError
from octavo.runtime import (
    BeamSearchParams,
    CompletionOutput,
    Logprob,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from octavo.runtime.metrics.request_metrics import RequestTimes
from octavo.tools.triton.child_request import Responses, read_params
from octavo.tools.triton.stub.request import BadRequestError, read_request
from tests.unit.triton_fakes import Request

METRICS = RequestTimes().metrics(num_output_tokens=0, num_cached_tokens=0, num_preemptions=0)


def test_a_text_alone_is_a_request_with_every_default() -> None:
    assert read_request(Request(text_input="héllo")) == {
        "text": "héllo",
        "token_ids": None,
        "parameters": {},
        "stream": False,
        "exclude_input": None,
        "returns": [],
        "priority": 0,
        "cache_salt": "",
    }


def test_every_flag_and_the_prompt_as_token_ids() -> None:
    request = Request(
        input_ids=np.array([5, 6, 7], np.int32),
        stream=np.array([True]),
        exclude_input_in_output=np.array([False]),
        return_num_output_tokens=np.array([True]),
        return_logprobs=np.array([False]),
        priority=np.array([-3], np.int32),
        cache_salt="tenant",
    )
    read = read_request(request)
    assert read["token_ids"] == [5, 6, 7]
    assert (read["stream"], read["exclude_input"]) == (True, False)
    assert read["returns"] == ["num_output_tokens"]
    assert (read["priority"], read["cache_salt"]) == (-3, "tenant")
    json.dumps(read, allow_nan=False)  # plain values, no numpy scalars


def test_a_float32_tensor_is_the_number_that_was_written() -> None:
    request = Request(text_input="x", temperature=np.array([0.7], np.float32))
    assert read_request(request)["parameters"] == {"temperature": 0.7}


def test_parameters_come_from_tensors_json_and_the_request() -> None:
    request = Request(
        text_input="x",
        max_tokens=np.array([9], np.int32),
        seed=np.array([2**64 - 1], np.uint64),
        sampling_parameters='{"logit_bias": {"5": 1.5}, "n": 2}',
        parameters='{"min_p": 0.25, "ignore_eos": true}',
    )
    assert read_request(request)["parameters"] == {
        "max_tokens": 9,
        "seed": 2**64 - 1,
        "logit_bias": {"5": 1.5},
        "n": 2,
        "min_p": 0.25,
        "ignore_eos": True,
    }


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ("\n\n", ["\n\n"]),
        (["a", "b"], ["a", "b"]),
        ('["a", "b"]', ["a", "b"]),
        ("[INST]", ["[INST]"]),
        ("[1]", ["[1]"]),
    ],
    ids=["one", "several", "json", "a text with a bracket", "a json list of no texts"],
)
def test_stop_texts_may_be_elements_or_one_json_list(given: Any, texts: list[str]) -> None:
    assert read_request(Request(text_input="x", stop_words=given))["parameters"] == {"stop": texts}


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        ({}, "a request needs text_input or input_ids, neither is given: give one"),
        (
            {"text_input": "x", "input_ids": [1]},
            "a request needs text_input or input_ids, both are given: give one",
        ),
        ({"text_input": ["x", "y"]}, "text_input has 2 elements, it must have one"),
        (
            {"text_input": np.array([b"\xff"], np.object_)},
            "text_input is not UTF-8 text (invalid start byte)",
        ),
        ({"text_input": "x", "image": "y"}, "'image' is no input of this model"),
        (
            {"text_input": "x", "sampling_parameters": '"n"'},
            "sampling_parameters is '\"n\"', it must be a JSON object",
        ),
        (
            {"text_input": "x", "stop": "a", "stop_words": "b"},
            "stop is given twice: give it once",
        ),
        (
            {"text_input": "x", "sampling_parameters": "[" * 100_000},
            "sampling_parameters is no JSON",
        ),
        (
            {"text_input": "x", "sampling_parameters": '{"seed": 1' + "0" * 5000 + "}"},
            "sampling_parameters is no JSON",
        ),
    ],
)
def test_a_malformed_request_is_refused_in_a_sentence(
    inputs: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(BadRequestError) as caught:
        read_request(Request(**inputs))
    assert str(caught.value).startswith(sentence)


def test_parameters_of_the_request_must_be_an_object_too() -> None:
    with pytest.raises(BadRequestError, match="the parameters of the request is no JSON"):
        read_request(Request(text_input="x", parameters="{"))


def params(given: dict[str, Any], *, stream: bool = False, returns: tuple[str, ...] = ()) -> Any:
    return read_params(given, stream=stream, returns=returns)


def test_parameters_are_those_of_sampling_params() -> None:
    given = {"temperature": 0.5, "stop": ["a"], "logit_bias": {"3": 1}, "n": 2, "top_p": 0.9}
    assert params(given, stream=True) == SamplingParams(
        temperature=0.5,
        stop=["a"],
        logit_bias={3: 1.0},
        n=2,
        top_p=0.9,
        output_kind=RequestOutputKind.DELTA,
    )


def test_numbers_and_truth_values_may_be_texts_and_texts_stay_texts() -> None:
    given = {"temperature": "0.5", "max_tokens": "7", "ignore_eos": "True", "stop": "5"}
    assert params(given) == SamplingParams(
        temperature=0.5,
        max_tokens=7,
        ignore_eos=True,
        stop="5",
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


@pytest.mark.parametrize("stream", [True, False])
def test_best_of_can_only_be_answered_at_the_end(stream: bool) -> None:
    made = params({"n": 1, "best_of": 3}, stream=stream)
    assert made.output_kind is RequestOutputKind.FINAL_ONLY


@pytest.mark.parametrize("name", ["logprobs", "cumulative_logprob"])
def test_log_probabilities_that_are_asked_for_are_computed(name: str) -> None:
    assert params({}).logprobs is None
    assert params({}, returns=(name,)).logprobs == 0
    assert params({"logprobs": 3}, returns=(name,)).logprobs == 3


def test_a_beam_width_above_one_is_a_beam_search() -> None:
    assert params({"beam_width": 1, "temperature": 0.3}).temperature == 0.3
    assert params({"beam_width": 4, "length_penalty": 2.0}) == BeamSearchParams(
        beam_width=4, max_tokens=16, length_penalty=2.0
    )
    with pytest.raises(RequestError, match="'seed' is no beam search parameter: choose from beam_"):
        params({"beam_width": 4, "seed": 2})


@pytest.mark.parametrize("name", ["temperatur", "logits_processors", "output_kind", "lora_name"])
def test_an_unknown_parameter_is_named(name: str) -> None:
    with pytest.raises(RequestError, match=f"^'{name}' is no sampling parameter: choose from n, "):
        params({name: 1})


def output(*completions: CompletionOutput, finished: bool = False) -> RequestOutput:
    return RequestOutput(
        request_id="r",
        prompt=None,
        prompt_token_ids=[1, 2, 3],
        outputs=list(completions),
        finished=finished,
        num_cached_tokens=0,
        metrics=METRICS,
    )


def test_completions_without_news_have_empty_elements() -> None:
    names = ["finish_reason", "cumulative_logprob", "num_output_tokens", "token_ids", "logprobs"]
    responses = Responses(2, names, prefix="")
    logprobs = [{7: Logprob(-1.5, 1, " a")}]
    first = CompletionOutput(0, " a", [7], logprobs=logprobs, cumulative_logprob=-1.5)
    second = CompletionOutput(1, " b", [8, 9], "length", cumulative_logprob=-4.0)
    assert responses.tensors(output(first)) == {
        "text_output": [" a", ""],
        "finish_reason": ["", ""],
        "cumulative_logprob": [-1.5, 0.0],
        "num_output_tokens": [1, 0],
        "token_ids": ["[7]", "[]"],
        "logprobs": ['[{"7": {"logprob": -1.5, "rank": 1, "decoded_token": " a"}}]', "[]"],
    }
    last = responses.tensors(output(second, replace(first, index=0, finish_reason="stop")))
    assert last["finish_reason"] == ["stop", "length"]
    assert last["cumulative_logprob"] == [-1.5, -4.0]


def test_the_prompt_stands_before_each_completion_once() -> None:
    responses = Responses(2, ["num_input_tokens"], prefix="Hi")
    one, two = CompletionOutput(0, " a", [7]), CompletionOutput(1, " b", [8])
    assert responses.tensors(output(one)) == {"text_output": ["Hi a", ""], "num_input_tokens": [3]}
    assert responses.tensors(output(one, two))["text_output"] == [" a", "Hi b"]
