"""A stock Triton Inference Server runs what `octavo export-triton` writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from octavo.runtime import LLM, SamplingParams
from tests.e2e import triton_grpc as grpc
from tests.e2e.conftest import Engines
from tests.e2e.triton_server import Server, export, require_triton, triton_server
from tests.server_process import serving
from tests.unit.word_bundles import continuation, words, write_word_engine

PROMPT = [3, 14, 15]
SMALL_CACHE = ("--kv-cache-memory", "2MiB")


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, null_engine: Path, smollm2_engines: Engines
) -> Iterator[Server]:
    require_triton()
    folder = tmp_path_factory.mktemp("triton")
    repository = folder / "repository"
    export(write_word_engine(folder / "words"), repository, *SMALL_CACHE)
    export(null_engine, repository, *SMALL_CACHE, "--name", "wordless")
    export(smollm2_engines["int8"], repository, "--name", "smollm2", "--link")
    with triton_server(repository, folder / "server.log") as running:
        yield running


@pytest.fixture(scope="module")
def http(smollm2_engines: Engines) -> Iterator[str]:
    """The url of `octavo serve` for the same engine."""
    with serving(smollm2_engines["int8"], "--kv-cache-memory=64MiB") as process:
        yield process.url


def test_every_model_is_ready(server: Server) -> None:
    assert all(server.is_ready(name) for name in ("words", "wordless", "smollm2"))
    assert not server.is_ready("none")


def test_generate_gives_the_prompt_and_its_continuation(server: Server) -> None:
    answer = server.generate("words", text_input=words(PROMPT), max_tokens=6, temperature=0.0)
    assert answer["text_output"] == words(PROMPT) + words(continuation(PROMPT, 6))


def test_generate_stream_gives_the_continuation_in_pieces(server: Server) -> None:
    pieces = server.stream("words", text_input=words(PROMPT), max_tokens=40, temperature=0.0)
    assert "".join(piece["text_output"] for piece in pieces) == words(continuation(PROMPT, 40))
    assert len(pieces) > 1


def test_a_grpc_stream_marks_the_last_piece_as_final(server: Server) -> None:
    (found,) = grpc.run_all(
        grpc.stream(
            server, "words", text_input=words(PROMPT), stream=True, max_tokens=20, temperature=0.0
        )
    )
    assert "".join(one.text() for one in found) == words(continuation(PROMPT, 20))
    assert [one.final for one in found] == [False] * (len(found) - 1) + [True]


def test_without_stream_there_is_one_response_and_it_is_final(server: Server) -> None:
    (found,) = grpc.run_all(
        grpc.stream(server, "words", text_input=words(PROMPT), max_tokens=20, temperature=0.0)
    )
    (only,) = found
    assert only.final
    assert only.text() == words(PROMPT) + words(continuation(PROMPT, 20))


def test_everything_that_is_asked_for_is_returned(server: Server) -> None:
    flags = (
        "finish_reason",
        "logprobs",
        "cumulative_logprob",
        "num_input_tokens",
        "num_output_tokens",
        "token_ids",
    )
    answer = server.generate(
        "words",
        text_input=words(PROMPT),
        max_tokens=3,
        temperature=0.0,
        exclude_input_in_output=True,
        **{f"return_{flag}": True for flag in flags},
    )
    expected = continuation(PROMPT, 3)
    assert answer["text_output"] == words(expected)
    assert json.loads(answer["token_ids"]) == expected
    assert (answer["num_input_tokens"], answer["num_output_tokens"]) == (3, 3)
    assert answer["finish_reason"] == "length"
    positions = json.loads(answer["logprobs"])
    assert [list(map(int, position)) for position in positions] == [[one] for one in expected]
    values = [
        position[str(one)]["logprob"] for position, one in zip(positions, expected, strict=True)
    ]
    assert all(value < 0 for value in values)  # the null engine is never certain
    assert answer["cumulative_logprob"] == pytest.approx(sum(values), rel=1e-6)


def test_nothing_is_returned_that_was_not_asked_for(server: Server) -> None:
    answer = server.generate("words", text_input="w1", max_tokens=2)
    assert set(answer) == {"model_name", "model_version", "text_output"}


def test_token_ids_are_taken_and_given_without_a_tokenizer(server: Server) -> None:
    (found,) = grpc.run_all(
        grpc.stream(
            server,
            "wordless",
            input_ids=PROMPT,
            max_tokens=5,
            temperature=0.0,
            return_token_ids=True,
        )
    )
    (only,) = found
    assert json.loads(only.outputs["token_ids"][0]) == continuation(PROMPT, 5)


def test_n_completions_come_as_n_elements(server: Server) -> None:
    request = {"text_input": "w1 w2", "n": 3, "seed": 5, "temperature": 1.0, "max_tokens": 8}
    texts = server.generate("words", **request, exclude_input_in_output=True)["text_output"]
    assert len(set(texts)) == 3
    pieces = server.stream("words", **request)
    assert [len(piece["text_output"]) for piece in pieces] == [3] * len(pieces)
    streamed = ["".join(piece["text_output"][i] for piece in pieces) for i in range(3)]
    assert streamed == texts


@pytest.mark.parametrize(
    "given",
    [
        {"sampling_parameters": '{"temperature": 0, "max_tokens": 5}'},
        {"sampling_parameters": '{"temperature": "0.0", "max_tokens": "5"}'},
        {"temperature": 0, "max_tokens": 5},
        {"top_k": 1, "max_tokens": 5},
        {"max_tokens": 5, "sampling_parameters": '{"logit_bias": {}, "temperature": 0}'},
    ],
    ids=["json", "json-texts", "tensors", "top-k", "both"],
)
def test_parameters_are_taken_from_json_and_tensors(server: Server, given: dict[str, Any]) -> None:
    answer = server.generate("words", text_input=words(PROMPT), **given)
    assert answer["text_output"] == words(PROMPT) + words(continuation(PROMPT, 5))


@pytest.mark.parametrize(
    "stop",
    [
        lambda text: {"stop": text},
        lambda text: {"stop": ["never", text]},
        lambda text: {"stop_words": json.dumps([text])},
        lambda text: {"sampling_parameters": json.dumps({"stop": text})},
    ],
    ids=["text", "list", "json-list", "parameter"],
)
def test_stop_texts_are_obeyed(server: Server, stop: Callable[[str], dict[str, Any]]) -> None:
    expected = continuation(PROMPT, 30)
    last = expected[10]
    answer = server.generate(
        "words",
        text_input=words(PROMPT),
        max_tokens=30,
        temperature=0.0,
        exclude_input_in_output=True,
        return_finish_reason=True,
        **stop(f"w{last}"),
    )
    text = words(expected)
    assert answer["text_output"] == text[: text.index(f"w{last}")]
    assert answer["finish_reason"] == "stop"


def test_a_beam_search_gives_its_hypotheses(server: Server) -> None:
    found = server.generate(
        "smollm2", text_input="A river in France:", beam_width=2, max_tokens=4, length_penalty=1.0
    )["text_output"]
    assert len(found) == 2
    assert all(text.startswith("A river in France:") for text in found)


def test_eight_concurrent_streams_give_what_each_gives_alone(server: Server) -> None:
    prompts = [[one, 7, 2 * one] for one in range(1, 9)]
    found = grpc.run_all(
        *(
            grpc.stream(
                server,
                "words",
                text_input=words(prompt),
                stream=True,
                max_tokens=60,
                temperature=0.0,
                return_token_ids=True,
            )
            for prompt in prompts
        )
    )
    for prompt, pieces in zip(prompts, found, strict=True):
        ids = [one for piece in pieces for one in json.loads(piece.outputs["token_ids"][0])]
        assert ids == continuation(prompt, 60)
        assert "".join(piece.text() for piece in pieces) == words(ids)


def test_r01_d01_a_stream_never_breaks_a_character(
    server: Server, smollm2_engines: Engines
) -> None:
    prompt = "Ten emojis: 😀🚀🎉😀🚀🎉😀🚀🎉😀🚀🎉😀🚀🎉"
    params = SamplingParams(temperature=0.0, max_tokens=48)
    with LLM(smollm2_engines["int8"]) as llm:
        (whole,) = llm.generate([prompt], params)
    pieces = server.stream("smollm2", text_input=prompt, max_tokens=48, temperature=0.0)
    texts = [piece["text_output"] for piece in pieces]
    assert "".join(texts) == whole.text
    assert whole.text.count("🚀") > 2
    assert len(whole.outputs[0].token_ids) > len(whole.text)  # characters of several tokens
    assert "\ufffd" not in "".join(texts)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.9, "seed": 12},
        {"temperature": 1.3, "top_k": 40, "seed": 3, "repetition_penalty": 1.1},
    ],
    ids=["greedy", "top-p", "top-k"],
)
def test_python_http_and_triton_give_the_same_tokens(
    server: Server, http: str, smollm2_engines: Engines, params: dict[str, Any]
) -> None:
    prompts = ["The capital of France is", "Once upon a time"]
    with LLM(smollm2_engines["int8"]) as llm:
        expected = llm.generate(prompts, SamplingParams(max_tokens=24, **params))
    for prompt, output in zip(prompts, expected, strict=True):
        request = {"text_input": prompt, "max_tokens": 24, "return_token_ids": True, **params}
        pieces = server.stream("smollm2", **request)
        ids = [one for piece in pieces for one in json.loads(piece["token_ids"])]
        assert ids == output.outputs[0].token_ids
        answer = server.generate("smollm2", **request)
        assert json.loads(answer["token_ids"]) == output.outputs[0].token_ids
        assert answer["text_output"] == prompt + output.text
        body = {"model": "int8", "prompt": prompt, "max_tokens": 24, "return_token_ids": True}
        completion = httpx2.post(f"{http}/v1/completions", json=body | params, timeout=60).json()
        (choice,) = completion["choices"]
        assert choice["token_ids"] == output.outputs[0].token_ids
        assert choice["text"] == output.text


BAD_REQUESTS = {
    "no prompt": ({"max_tokens": 1}, "a request needs text_input or input_ids, neither"),
    "an empty prompt (A01)": ({"text_input": ""}, "the prompt is empty"),
    "an overlong prompt (A02)": ({"text_input": "w1 " * 300}, "the prompt has 300 tokens"),
    "a prompt of max_model_len (A03)": ({"text_input": "w1 " * 256}, "the prompt has 256 tokens"),
    "an unknown parameter": ({"text_input": "w1", "temperatur": 1}, "'temperatur' is no sampling"),
    "no JSON": (
        {"text_input": "w1", "sampling_parameters": "{"},
        "sampling_parameters is no JSON",
    ),
    "no JSON object": (
        {"text_input": "w1", "sampling_parameters": "[1]"},
        "sampling_parameters is '[1]', it must be a JSON object",
    ),
    "a parameter twice": (
        {"text_input": "w1", "max_tokens": 1, "sampling_parameters": '{"max_tokens": 2}'},
        "max_tokens is given twice",
    ),
    "a bias outside the vocabulary (A04)": (
        {"text_input": "w1", "sampling_parameters": '{"logit_bias": {"97": 1}}'},
        "token id 97 in logit_bias lies outside the vocabulary of 97",
    ),
    "NaN (A11)": (
        {"text_input": "w1", "sampling_parameters": '{"top_p": NaN}'},
        "top_p is nan, it must lie in (0, 1]",
    ),
    "a negative temperature": ({"text_input": "w1", "temperature": -1.0}, "temperature is -1.0"),
    "no tokens": ({"text_input": "w1", "max_tokens": 0}, "max_tokens is 0"),
    "greedy and n": ({"text_input": "w1", "n": 2, "temperature": 0.0}, "n is 2, n must be 1"),
    "a parameter of another type": ({"text_input": "w1", "n": "two"}, "n is 'two'"),
    "functions": (
        {"text_input": "w1", "logits_processors": "print"},
        "'logits_processors' is no sampling",
    ),
}


@pytest.mark.parametrize(("request_", "sentence"), BAD_REQUESTS.values(), ids=BAD_REQUESTS.keys())
def test_a_bad_request_is_told_why_and_harms_nobody(
    server: Server, request_: dict[str, Any], sentence: str
) -> None:
    (engine,) = server.engines("words")
    assert sentence in server.refusal("words", **request_)
    assert server.generate("words", text_input="w1", max_tokens=1)
    assert server.engines("words") == [engine]


def test_bytes_that_are_no_utf8_are_refused(server: Server) -> None:
    (found,) = grpc.run_all(grpc.stream(server, "words", text_input=b"w1 \xff\xfe"))
    (only,) = found
    assert only.error is not None
    assert "text_input is not UTF-8 text" in only.error


def test_token_ids_outside_the_vocabulary_are_refused(server: Server) -> None:
    (found,) = grpc.run_all(grpc.stream(server, "wordless", input_ids=[1, 97]))
    assert "the token id 97, ids must lie in [0, 97)" in str(found[0].error)
