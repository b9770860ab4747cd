"""Faults of other servers, each under its number: what is right instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.server_harness import MODEL, Server, run, serving
from tests.unit.word_bundles import LIMITS, VOCAB_SIZE, continuation, words, write_word_engine

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MAX_LEN = LIMITS.max_model_len


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    template = "w1 {{ messages[0].content }} w2"
    return write_word_engine(tmp_path_factory.mktemp("engines") / "words", chat_template=template)


@pytest.fixture(scope="module")
def bundle_of_long_answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    limits = LIMITS.model_copy(update={"max_model_len": 4096})
    return write_word_engine(tmp_path_factory.mktemp("engines") / "long", limits=limits)


async def lives(server: Server) -> None:
    """The engine answers as ever, and nothing of what came before is left in it."""
    answer = await server.complete("w5", max_tokens=2)
    assert answer["choices"][0]["text"] == words(continuation([5], 2))
    assert await server.gauges() == (0, 0, 0)


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], ["w1", ""], [[1], []]])
def test_a01_an_empty_prompt_is_refused(bundle: Path, prompt: Any) -> None:
    async def test() -> None:
        async with serving(bundle) as server:
            status, error = await server.refusal(COMPLETIONS, prompt=prompt)
            assert (status, error["type"]) == (400, "invalid_request_error")
            assert error["message"] == "the prompt is empty: give at least one token"
            await lives(server)

    run(test())


@pytest.mark.parametrize("stream", [False, True])
def test_a02_an_overlong_prompt_is_refused(bundle: Path, stream: bool) -> None:
    async def test() -> None:
        async with serving(bundle) as server:
            prompt = [1] * (MAX_LEN + 50)
            status, error = await server.refusal(COMPLETIONS, prompt=prompt, stream=stream)
            assert (status, error["code"]) == (400, "context_length_exceeded")
            assert (
                f"has {MAX_LEN + 50} tokens, the engine takes at most {MAX_LEN - 1}"
                in (error["message"])
            )
            messages = [{"role": "user", "content": "w1 " * MAX_LEN}]
            status, error = await server.refusal(CHAT, messages=messages, stream=stream)
            assert (status, error["code"]) == (400, "context_length_exceeded")
            await lives(server)

    run(test())


def test_a03_a_prompt_as_long_as_the_model_is_refused_one_token_less_gets_one(
    bundle: Path,
) -> None:
    async def test() -> None:
        async with serving(bundle) as server:
            status, _ = await server.refusal(COMPLETIONS, prompt=[1] * MAX_LEN)
            assert status == 400
            answer = await server.complete([1] * (MAX_LEN - 1), max_tokens=50)
            (choice,) = answer["choices"]
            assert choice["text"] == words(continuation([1] * (MAX_LEN - 1), 1))
            assert choice["finish_reason"] == "length"
            assert answer["usage"]["completion_tokens"] == 1

    run(test())


@pytest.mark.parametrize("token", [str(VOCAB_SIZE), "99999999999999999999", "-1", "x"])
def test_a04_a_bias_outside_the_vocabulary_is_refused(bundle: Path, token: str) -> None:
    async def test() -> None:
        async with serving(bundle) as server:
            status, error = await server.refusal(COMPLETIONS, prompt="w1", logit_bias={token: 1})
            assert status == 400
            assert "logit_bias" in error["message"]
            await lives(server)

    run(test())


def test_a06_echo_without_tokens_gives_the_prompt_alone(bundle: Path) -> None:
    async def test() -> None:
        async with serving(bundle) as server:
            options = {"echo": True, "max_tokens": 0}
            answer = await server.complete("w1 w2 w3", **options)
            (choice,) = answer["choices"]
            assert (choice["text"], choice["finish_reason"]) == ("w1 w2 w3", "length")
            assert answer["usage"]["prompt_tokens"] == 3
            assert answer["usage"]["completion_tokens"] == 0
            answer = await server.complete([1, 2, 3], logprobs=1, **options)
            (choice,) = answer["choices"]
            assert choice["text"] == "w1 w2 w3"
            assert choice["logprobs"]["tokens"] == [" w1", " w2", " w3"]
            assert choice["logprobs"]["token_logprobs"][0] is None
            assert len(choice["logprobs"]["token_logprobs"]) == 3
            chunks = await server.complete("w1 w2 w3", stream=True, **options)
            assert [chunk["choices"][0]["text"] for chunk in chunks] == ["w1 w2 w3"]

    run(test())


def test_a07_offsets_are_the_same_when_an_echo_is_streamed(bundle: Path) -> None:
    async def test() -> None:
        async with serving(bundle) as server:
            options = {"echo": True, "logprobs": 0, "max_tokens": 4}
            answer = await server.complete("w1 w22 w3", **options)
            chunks = await server.complete("w1 w22 w3", stream=True, **options)
            (whole,) = answer["choices"]
            text = "w1 w22 w3" + words(continuation([1, 22, 3], 4))
            assert whole["text"] == text
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
            streamed = [
                offset
                for chunk in chunks
                for offset in chunk["choices"][0]["logprobs"]["text_offset"]
            ]
            assert streamed == whole["logprobs"]["text_offset"]
            # Each token begins where the text of those before it ends.
            lengths = [len("w1"), len(" w22"), len(" w3")]
            for number, token in enumerate(continuation([1, 22, 3], 3)):
                lengths.append(len(f" w{token}") - (number == 0))
            assert streamed == [sum(lengths[:count]) for count in range(7)]

    run(test())


@pytest.mark.parametrize(("options", "usages"), [({}, 0), ({"include_usage": True}, 1)])
def test_a08_usage_is_streamed_only_if_asked_for(
    bundle: Path, options: dict[str, Any], usages: int
) -> None:
    async def test() -> None:
        async with serving(bundle) as server:
            for answer in (server.complete, server.chat):
                chunks = await answer("w1", max_tokens=3, stream=True, stream_options=options)
                last = [chunk for chunk in chunks if not chunk["choices"]]
                assert len(last) == usages
                assert all("usage" in chunk for chunk in chunks) is bool(usages)
                for chunk in last:
                    assert chunk["usage"]["completion_tokens"] == 3
                    assert chunk is chunks[-1]

    run(test())


def test_a10_usage_counts_every_choice(bundle: Path) -> None:
    async def test() -> None:
        async with serving(bundle) as server:
            options = {"n": 3, "temperature": 1, "max_tokens": 5}
            answer = await server.complete(["w1 w2", "w3"], **options)
            assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3, 4, 5]
            expected = {"prompt_tokens": 3, "completion_tokens": 30, "total_tokens": 33}
            assert answer["usage"].items() >= expected.items()
            usage = {"stream_options": {"include_usage": True}, "stream": True}
            chunks = await server.complete(["w1 w2", "w3"], **options, **usage)
            assert chunks[-1]["usage"].items() >= expected.items()

    run(test())


@pytest.mark.parametrize("field", ["top_p", "temperature", "min_p", "presence_penalty"])
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_a11_what_is_no_number_is_refused(bundle: Path, field: str, value: str) -> None:
    async def test() -> None:
        async with serving(bundle) as server:
            body = f'{{"model": "{MODEL}", "prompt": "w1", "{field}": {value}}}'
            response = await server.client.post(
                COMPLETIONS, content=body, headers={"content-type": "application/json"}
            )
            assert response.status_code == 400
            assert field in response.json()["error"]["message"]
            await lives(server)

    run(test())


def test_a12_a_tiny_temperature_is_nearly_greedy(bundle: Path) -> None:
    async def test() -> None:
        async with serving(bundle) as server:
            answer = await server.complete("w1", temperature=1e-4, max_tokens=20)
            assert answer["choices"][0]["text"] == words(continuation([1], 20))

    run(test())


def test_a15_an_output_that_is_cut_says_so(bundle: Path) -> None:
    async def test() -> None:
        async with serving(bundle) as server:
            for answer in (server.complete, server.chat):
                whole = await answer("w1", max_tokens=3)
                assert whole["choices"][0]["finish_reason"] == "length"
                chunks = await answer("w1", max_tokens=3, stream=True)
                reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
                assert reasons[-1] == "length"
                assert set(reasons[:-1]) <= {None}  # tokens that came together share a chunk

    run(test())


def test_a16_max_completion_tokens_is_obeyed(bundle: Path) -> None:
    async def test() -> None:
        async with serving(bundle) as server:
            answer = await server.chat("w1", max_completion_tokens=3)
            assert answer["usage"]["completion_tokens"] == 3
            answer = await server.chat("w1", max_completion_tokens=3, max_tokens=7)
            assert answer["usage"]["completion_tokens"] == 3
            # Without either an answer may fill the context.
            answer = await server.chat("w1")
            assert answer["usage"]["total_tokens"] == MAX_LEN

    run(test())


def test_a17_the_first_delta_has_the_role(bundle: Path) -> None:
    async def test() -> None:
        async with serving(bundle) as server:
            chunks = await server.chat("w1", max_tokens=3, n=2, temperature=1, stream=True)
            for index in (0, 1):
                deltas = [
                    chunk["choices"][0]["delta"]
                    for chunk in chunks
                    if chunk["choices"][0]["index"] == index
                ]
                assert deltas[0] == {"role": "assistant", "content": ""}
                assert not any("role" in delta for delta in deltas[1:])
            answer = await server.chat("w1", max_tokens=3)
            assert answer["choices"][0]["message"]["role"] == "assistant"

    run(test())


@pytest.mark.parametrize("num_parts", [0, 1, 5])
@pytest.mark.parametrize("options", [{}, {"logprobs": 5}, {"n": 3}, {"echo": True, "logprobs": 2}])
def test_a18_leaving_frees_the_request(
    bundle_of_long_answers: Path, options: dict[str, Any], num_parts: int
) -> None:
    # A client that waits for its turn among other processes still leaves before the end.
    body = {"max_tokens": 4000, **options}

    async def test() -> None:
        async with serving(bundle_of_long_answers, llm={"num_kv_blocks": 800}) as server:
            parts = await server.open_then_leave(
                COMPLETIONS, num_parts, prompt="w1 w2", stream=True, **body
            )
            assert not any(b"[DONE]" in part for part in parts)
            await lives(server)
            await server.open_then_leave(COMPLETIONS, 0, prompt="w1", **body)
            await lives(server)

    run(test())
