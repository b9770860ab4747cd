"""Chats whose model calls tools, and combinations that cannot be."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from octavo.backends import null
from octavo.runtime.text.tokenizer import Tokenizer as Octavo
from tests.unit.server_harness import Server, run, serving
from tests.unit.word_bundles import LIMITS, VOCAB_SIZE, write_word_engine

CHAT = "/v1/chat/completions"
TEMPLATE = "{% if tools %}<tool_call>{% endif %}{{ messages[-1].content }}"
ADD = {"type": "function", "function": {"name": "add"}}
CALL, STOP = 7, 8  # tokens: a whole call as a model writes it, and the end
WRITTEN = '<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>'
# The first token cannot be the end, so it is the call; then the end is by far the likeliest.
CALLING = {
    "allowed_token_ids": [CALL, STOP],
    "stop_token_ids": [STOP],
    "min_tokens": 1,
    "logit_bias": {str(STOP): 100},
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of the words of this model is a call."""
    vocabulary = {f"w{i}": i for i in range(VOCAB_SIZE) if i != CALL} | {WRITTEN: CALL}
    backend = Tokenizer(models.WordLevel(vocabulary, "w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.WordPiece("##")
    files = {
        "tokenizer.json": backend.to_str().encode(),
        "chat_template.jinja": TEMPLATE.encode(),
    }
    path = tmp_path_factory.mktemp("engines") / "calling"
    return null.write_engine(path, vocab_size=VOCAB_SIZE, limits=LIMITS, extra_files=files)


def test_a_call_that_the_model_writes_is_a_call(bundle: Path) -> None:
    async def test() -> None:
        async with serving(bundle) as server:
            answer = await server.chat("w1", tools=[ADD], **CALLING)
            (choice,) = answer["choices"]
            assert choice["finish_reason"] == "tool_calls"
            assert choice["message"]["content"] is None
            (call,) = choice["message"]["tool_calls"]
            assert (call["type"], call["function"]["name"]) == ("function", "add")
            assert json.loads(call["function"]["arguments"]) == {"a": 1}
            chunks = await server.chat("w1", tools=[ADD], stream=True, **CALLING)
            deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
            (streamed,) = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
            assert streamed["index"] == 0
            assert streamed["function"] == call["function"]
            assert not any(delta.get("content") for delta in deltas)
            assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"

    run(test())


@pytest.mark.parametrize("body", [{}, {"tools": [ADD], "tool_choice": "none"}])
def test_without_tools_it_is_text(bundle: Path, body: dict[str, Any]) -> None:
    async def test() -> None:
        async with serving(bundle) as server:
            answer = await server.chat("w1", **CALLING, **body)
            (choice,) = answer["choices"]
            assert choice["message"] == {"role": "assistant", "content": WRITTEN, "refusal": None}
            assert choice["finish_reason"] == "stop"

    run(test())


def test_the_format_can_be_given(bundle: Path) -> None:
    async def test() -> None:
        async with serving(bundle, tool_call_format="mistral") as server:
            answer = await server.chat("w1", tools=[ADD], **CALLING)
            assert answer["choices"][0]["message"]["content"] == WRITTEN

    run(test())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"tool_choice": "required"}, "tool_choice is given without tools"),
        ({"tools": [], "tool_choice": "auto"}, "tool_choice is given without tools"),
        (
            {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}},
            "tool_choice names 'sub', which is none of the tools: add",
        ),
        (
            {"tools": [ADD], "response_format": {"type": "json_object"}},
            "response_format or structured_outputs is given with tools",
        ),
        (
            {"tools": [ADD], "structured_outputs": {"regex": "a"}},
            "response_format or structured_outputs is given with tools",
        ),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "response_format and structured_outputs are both given",
        ),
        ({"response_format": {"type": "json_schema"}}, "has no json_schema: give one"),
        ({"response_format": {"type": "xml"}}, "response_format holds"),
        ({"top_logprobs": 3}, "top_logprobs is given and logprobs is not true"),
        ({"logprobs": True, "top_logprobs": 21}, "the server gives at most 20"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs holds 'messages'"),
        ({"n": 200}, "the request asks for 200 completions"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "user"}]}, "has no content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "'image_url'"),
        ({"max_tokens": 0}, "max_tokens is 0"),
    ],
)
def test_what_cannot_be_is_refused(bundle: Path, body: dict[str, Any], message: str) -> None:
    async def test() -> None:
        async with serving(bundle) as server:
            request = {"messages": [{"role": "user", "content": "w1"}], **body}
            status, error = await server.refusal(CHAT, **request)
            assert status == 400
            assert message in error["message"]

    run(test())


def test_a_template_that_does_not_show_calls_needs_a_format(tmp_path: Path) -> None:
    engine = write_word_engine(tmp_path / "words", chat_template="{{ tools }}{{ messages }}")

    async def refusal(server: Server) -> str:
        body = {"messages": [{"role": "user", "content": "w1"}], "tools": [ADD]}
        _, error = await server.refusal(CHAT, **body)
        return str(error["message"])

    async def test() -> None:
        async with serving(engine) as server:
            assert "start the server with --tool-call-format" in await refusal(server)
        async with serving(engine, tool_call_format="hermes") as server:
            answer = await server.chat("w1", tools=[ADD], max_tokens=2)
            assert answer["choices"][0]["finish_reason"] == "length"

    run(test())


def test_tokens_are_told_both_ways(tmp_path: Path) -> None:
    engine = write_word_engine(tmp_path / "words", chat_template="w1 {{ messages[0].content }}")

    async def test() -> None:
        async with serving(engine) as server:
            answer = (await server.post("/tokenize", prompt="w5 w6", return_token_strs=True)).json()
            assert answer == {
                "count": 2, "max_model_len": 256, "tokens": [5, 6], "token_strs": [" w5", " w6"],
            }  # fmt: skip
            messages = [{"role": "user", "content": "w9"}]
            answer = (await server.post("/tokenize", messages=messages)).json()
            assert (answer["tokens"], answer["token_strs"]) == ([1, 9], None)
            answer = (await server.post("/detokenize", tokens=[5, 6])).json()
            assert answer == {"prompt": "w5 w6"}
            for body in ({}, {"prompt": "w1", "messages": messages}):
                status, error = await server.refusal("/tokenize", **body)
                assert (status, error["message"][:11]) == (400, "give either")
            status, error = await server.refusal("/detokenize", tokens=[VOCAB_SIZE])
            assert status == 400
            assert f"the token id {VOCAB_SIZE} lies outside" in error["message"]

    run(test())


def test_long_texts_are_read_beside_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The streams of others are written by the loop's thread: it does not wait for a text."""
    engine = write_word_engine(tmp_path / "words")
    threads: dict[str, set[int]] = {}
    for name in ("encode", "decode", "token_text"):
        original = getattr(Octavo, name)

        def watched(
            self: Octavo, *args: Any, _name: str = name, _do: Any = original, **options: Any
        ) -> Any:
            threads.setdefault(_name, set()).add(threading.get_ident())
            return _do(self, *args, **options)

        monkeypatch.setattr(Octavo, name, watched)

    async def test() -> None:
        async with serving(engine) as server:
            ids = [5, 6] * 2500
            text = " ".join(["w5 w6"] * 2500)
            body = {"prompt": text, "return_token_strs": True}
            answer = (await server.post("/tokenize", **body)).json()
            assert (answer["tokens"], answer["token_strs"]) == (ids, [" w5", " w6"] * 2500)
            answer = (await server.post("/detokenize", tokens=ids)).json()
            assert answer == {"prompt": text}
            # Its text is made before the engine finds it too long.
            refused = await server.refusal("/v1/completions", prompt=ids, echo=True)
            assert refused[0] == 400
        assert threads.keys() == {"encode", "decode", "token_text"}
        assert not any(threading.get_ident() in found for found in threads.values())

    run(test())
