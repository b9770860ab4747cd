"""The official client, as it is, against `octavo serve`: every answer worked out by hand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from octavo.backends.manifest import Limits
from tests.server_process import ServerProcess, serving
from tests.unit.runtime_bundles import byte_tokenizer, write_text_engine
from tests.unit.word_bundles import continuation, words, write_word_engine

KEY = "secret"
TEMPLATE = "w1 {% for message in messages %}{{ message.content }} {% endfor %}w2"
TOOL_TEMPLATE = "{% if tools %}<tool_call>{% endif %}{{ messages[-1].content }}"
LIMITS = Limits(max_model_len=2048, max_num_seqs=16, max_num_batched_tokens=256, block_size=16)
USER: Any = {"role": "user", "content": "w3 w4"}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "maximum": 99}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Ids and words are one."""
    folder = tmp_path_factory.mktemp("engines") / "words"
    engine = write_word_engine(folder, chat_template=TEMPLATE, limits=LIMITS)
    options = ("--scheduling-policy=priority", "--max-open-requests=8")
    with serving(engine, *options, environment={"OCTAVO_API_KEYS": f"other,{KEY}"}) as process:
        yield process


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def shaped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    """A model of one token a byte whose chat template knows tools."""
    files = {"tokenizer.json": byte_tokenizer(), "chat_template.jinja": TOOL_TEMPLATE.encode()}
    engine = write_text_engine(
        tmp_path_factory.mktemp("engines") / "bytes",
        eos_token_ids=[0],
        extra_files=files,
        limits=LIMITS,
    )
    with (
        serving(engine, "--model-name=m") as process,
        OpenAI(base_url=f"{process.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def chat_tokens(*texts: str) -> list[int]:
    """The prompt that the template makes of messages."""
    return [1, *(int(word[1:]) for text in texts for word in text.split()), 2]


def test_models(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.owned_by) == ("words", "octavo")
    assert client.models.retrieve("words") == model
    assert model.model_extra == {"max_model_len": 2048}


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("w5 w6", [[5, 6]]),
        (["w5", "w6 w7"], [[5], [6, 7]]),
        ([5, 6], [[5, 6]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
    ],
)
def test_completions_of_every_kind_of_prompt(
    client: OpenAI, prompt: Any, prompts: list[list[int]]
) -> None:
    answer = client.completions.create(model="words", prompt=prompt, max_tokens=4, temperature=0)
    assert [choice.text for choice in answer.choices] == [
        words(continuation(ids, 4)) for ids in prompts
    ]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(map(len, prompts))
    assert answer.usage.completion_tokens == 4 * len(prompts)
    assert (answer.id[:5], answer.object, answer.model) == ("cmpl-", "text_completion", "words")


def test_a_stream_of_completions_is_the_whole_one(client: OpenAI) -> None:
    stream = client.completions.create(
        model="words",
        prompt=["w5", "w6"],
        max_tokens=6,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts = ["", ""]
    chunks = list(stream)
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        assert chunk.usage is None
    assert texts == [words(continuation([5], 6)), words(continuation([6], 6))]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12


def test_stop_texts_and_echo(client: OpenAI) -> None:
    tokens = continuation([5], 6)
    stop = f" w{tokens[2]}"
    for given in (stop, ["never", stop]):
        answer = client.completions.create(
            model="words", prompt="w5", max_tokens=6, temperature=0, stop=given, echo=True
        )
        (choice,) = answer.choices
        assert choice.text == "w5" + words(tokens[:2])
        assert choice.finish_reason == "stop"


def test_log_probabilities_of_completions(client: OpenAI) -> None:
    answer = client.completions.create(
        model="words", prompt="w5", max_tokens=3, temperature=0, logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    tokens = continuation([5], 3)
    assert logprobs.tokens == [f" w{token}" for token in tokens]
    assert logprobs.top_logprobs is not None
    for token, own, top in zip(
        tokens, logprobs.token_logprobs or [], logprobs.top_logprobs, strict=True
    ):
        # The id after the likeliest one is the second likeliest, by 0.251.
        second = f" w{(token + 1) % 97}"
        assert top == {f" w{token}": own, second: pytest.approx((own or 0) - 0.251, abs=1e-6)}


def test_chat(client: OpenAI) -> None:
    system: Any = {"role": "system", "content": "w9"}
    answer = client.chat.completions.create(
        model="words", messages=[system, USER], max_completion_tokens=5, temperature=0
    )
    (choice,) = answer.choices
    expected = words(continuation(chat_tokens("w9", "w3 w4"), 5))
    assert (choice.message.role, choice.message.content) == ("assistant", expected)
    assert (choice.finish_reason, answer.id[:9]) == ("length", "chatcmpl-")
    # A newer name of the same role, and parts of a text.
    parts: Any = [{"type": "text", "text": "w3 w4"}]
    again = client.chat.completions.create(
        model="words",
        messages=[{"role": "developer", "content": "w9"}, {"role": "user", "content": parts}],
        max_completion_tokens=5,
        temperature=0,
    )
    assert again.choices == answer.choices
    assert again.system_fingerprint == answer.system_fingerprint


def test_a_stream_of_a_chat(client: OpenAI) -> None:
    tokens = continuation(chat_tokens("w3 w4"), 6)
    stop = f" w{tokens[5]}"
    with client.chat.completions.stream(
        model="words", messages=[USER], stop=stop, temperature=0, logprobs=True
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == words(tokens[:5]) == final.choices[0].message.content
    logprobs = final.choices[0].logprobs
    assert logprobs is not None
    assert len(logprobs.content or []) == 6  # with the token that ended it


def test_log_probabilities_of_a_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="words",
        messages=[USER],
        max_completion_tokens=2,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    tokens = continuation(chat_tokens("w3 w4"), 2)
    for token, entry in zip(tokens, logprobs.content or [], strict=True):
        assert (entry.token, bytes(entry.bytes or [])) == (f" w{token}", f" w{token}".encode())
        tops = [top.token for top in entry.top_logprobs]
        assert tops == [f" w{(token + distance) % 97}" for distance in range(3)]
        assert entry.top_logprobs[0].logprob == entry.logprob


def test_a_seed_repeats_several_choices(client: OpenAI) -> None:
    options: Any = {"model": "words", "messages": [USER], "n": 3, "max_tokens": 8}
    first, second, other = (
        client.chat.completions.create(**options, seed=seed) for seed in (-7, -7, 8)
    )
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert first.choices == second.choices
    assert first.choices != other.choices
    assert len({choice.message.content for choice in first.choices}) == 3


def test_what_openai_lacks_goes_into_the_extra_body(client: OpenAI) -> None:
    extra = {
        "top_k": 1,
        "min_p": 0.1,
        "repetition_penalty": 1.0,
        "priority": -3,
        "cache_salt": "mine",
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = client.completions.create(model="words", prompt="w5", max_tokens=5, extra_body=extra)
    (choice,) = answer.choices
    assert choice.text == words(continuation([5], 5))
    assert choice.model_extra is not None
    assert choice.model_extra["token_ids"] == continuation([5], 5)
    assert choice.model_extra["prompt_token_ids"] == [5]


def test_cached_tokens_are_told(client: OpenAI) -> None:
    prompt = [7] * 40
    numbers = []
    for _ in range(2):
        answer = client.completions.create(
            model="words", prompt=prompt, max_tokens=1, extra_body={"cache_salt": "told"}
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        numbers.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert numbers == [0, 32]  # two blocks of 16


def test_errors_are_the_clients_own(client: OpenAI, server: ServerProcess) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="words", prompt="w5", extra_body={"topk": 1})
    assert (refused.value.param, refused.value.code) == ("topk", "unknown_parameter")
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="words", prompt=[5] * 3000)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="temperature is -1"):
        client.completions.create(model="words", prompt="w5", temperature=-1)
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-4", prompt="w5")
    assert missing.value.code == "model_not_found"
    with (
        OpenAI(base_url=f"{server.url}/v1", api_key="wrong") as stranger,
        pytest.raises(openai.AuthenticationError) as unknown,
    ):
        stranger.models.list()
    assert unknown.value.code == "invalid_api_key"
    assert unknown.value.request_id


def test_more_requests_than_may_be_open_are_refused(server: ServerProcess) -> None:
    async def test() -> None:
        options: Any = {"base_url": f"{server.url}/v1", "api_key": KEY, "max_retries": 0}
        async with AsyncOpenAI(**options) as client:
            request: Any = {"model": "words", "prompt": "w5", "max_tokens": 1500, "stream": True}
            streams = [await client.completions.create(**request) for _ in range(8)]
            with pytest.raises(openai.RateLimitError) as refused:
                await client.completions.create(**request)
            assert refused.value.response.headers["retry-after"] == "1"
            assert "8 requests are open" in str(refused.value)
            for stream in streams:
                await stream.close()
            # Who left made room at once.
            answer = await client.with_options(max_retries=5).completions.create(
                model="words", prompt="w5", max_tokens=2, temperature=0
            )
            assert answer.choices[0].text == words(continuation([5], 2))

    asyncio.run(test())


def test_tasks_share_a_client(server: ServerProcess) -> None:
    async def test() -> None:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY) as client:

            async def one(token: int) -> str:
                stream = await client.completions.create(
                    model="words", prompt=[token], max_tokens=20, temperature=0, stream=True
                )
                return "".join([chunk.choices[0].text async for chunk in stream])

            texts = await asyncio.gather(*(one(token) for token in range(8)))
            assert texts == [words(continuation([token], 20)) for token in range(8)]

    asyncio.run(test())


class Person(BaseModel):
    first: bool
    digits: list[int]


def test_structured_output(shaped: OpenAI) -> None:
    answer = shaped.chat.completions.parse(
        model="m",
        messages=[{"role": "user", "content": "Who?"}],
        response_format=Person,
        max_completion_tokens=200,
        seed=1,
    )
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(answer.choices[0].message.parsed, Person)
    chosen = shaped.chat.completions.create(
        model="m",
        messages=[{"role": "user", "content": "Where?"}],
        extra_body={"structured_outputs": {"choice": ["left", "right"]}},
    )
    assert chosen.choices[0].message.content in ("left", "right")
    with pytest.raises(openai.BadRequestError, match="Invalid type: frob"):
        shaped.completions.create(
            model="m", prompt="a", extra_body={"structured_outputs": {"json": {"type": "frob"}}}
        )


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_forced_tool_calls_fit_their_schema(shaped: OpenAI, choice: Any) -> None:
    options: Any = {
        "model": "m",
        "messages": [{"role": "user", "content": "What is 1 + 1?"}],
        "tools": [TOOL],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_completion_tokens": 400,
        "seed": 3,
    }
    answer = shaped.chat.completions.create(**options)
    (call,) = answer.choices[0].message.tool_calls or []
    assert (call.type, call.function.name) == ("function", "add")
    assert json.loads(call.function.arguments)["a"] <= 99
    assert answer.choices[0].finish_reason == ("tool_calls" if choice == "required" else "stop")
    assert answer.choices[0].message.content is None
    with shaped.chat.completions.stream(**options) as stream:
        final = stream.get_final_completion()
    (streamed,) = final.choices[0].message.tool_calls or []
    assert streamed.function.arguments == call.function.arguments
    # And the conversation goes on with its result.
    messages: Any = [
        *options["messages"],
        answer.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": "2"},
    ]
    shaped.chat.completions.create(
        model="m", messages=messages, tools=options["tools"], max_completion_tokens=3
    )


def test_tools_that_the_model_would_never_see_are_refused(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="chat template knows none"):
        client.chat.completions.create(model="words", messages=[USER], tools=[TOOL])
