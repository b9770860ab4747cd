"""What stands before the endpoints: keys, rates, sizes, origins; and what is told of answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from octavo.graphs.errors import OctavoError
from octavo.tools.server.guard import RateLimit
from tests.unit.server_harness import JSON, MODEL, Server, run, serving
from tests.unit.word_bundles import continuation, words, write_word_engine

COMPLETIONS = "/v1/completions"
BODY = json.dumps({"model": MODEL, "prompt": [5], "max_tokens": 2, "temperature": 0})


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_word_engine(tmp_path_factory.mktemp("engines") / "words")


async def post(server: Server, content: Any = BODY, **headers: str) -> httpx2.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await server.client.post(COMPLETIONS, content=content, headers=JSON | named)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"authorization": "Bearer"},
        {"authorization": "Bearer wrong"},
        {"authorization": "Bearer key-1x"},
        {"authorization": "Basic key-1"},
        {"authorization": "key-1"},
    ],
)
def test_a_request_needs_one_of_the_keys(bundle: Path, given: dict[str, str]) -> None:
    async def test() -> None:
        async with serving(bundle, api_keys=("key-1", "key-2")) as server:
            refused = await post(server, **given)
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"] == "Bearer"
            assert refused.json()["error"]["code"] == "invalid_api_key"
            assert "key-1" not in refused.text
            for path in ("/v1/models", "/info"):
                assert (await server.client.get(path)).status_code == 401
            for path in ("/", "/health", "/ready", "/metrics", "/openapi.json"):
                assert (await server.client.get(path)).status_code == 200
            for key in ("key-1", "key-2"):
                answer = await post(server, authorization=f"bearer {key}")
                assert answer.json()["choices"][0]["text"] == words(continuation([5], 2))

    run(test())


def test_a_body_may_be_so_long_and_no_longer(bundle: Path) -> None:
    async def parts(text: str) -> AsyncIterator[bytes]:
        for start in range(0, len(text), 40):
            yield text[start : start + 40].encode()

    async def test() -> None:
        async with serving(bundle, max_body_bytes=len(BODY) + 10) as server:
            assert (await post(server, BODY + " " * 10)).status_code == 200
            refused = await post(server, BODY + " " * 11)
            assert refused.status_code == 413
            assert f"at most {len(BODY) + 10}" in refused.json()["error"]["message"]
            # Without a length, it is counted.
            assert (await post(server, parts(BODY))).status_code == 200
            assert (await post(server, parts(BODY + " " * 11))).status_code == 413

    run(test())


def test_a_body_that_does_not_arrive_is_not_waited_for(bundle: Path) -> None:
    async def stuck() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(30)

    async def test() -> None:
        async with serving(bundle, body_timeout=0.05) as server:
            refused = await post(server, stuck())
            assert refused.status_code == 408
            assert "within 0.05 s" in refused.json()["error"]["message"]

    run(test())


def test_rates_are_counted_by_key(bundle: Path) -> None:
    async def test() -> None:
        async with serving(bundle, api_keys=("a", "b"), rate_limit="2/hour") as server:
            for expected in (200, 200, 429):
                answer = await post(server, authorization="Bearer a")
                assert answer.status_code == expected
            assert answer.headers["retry-after"] == "1"
            error = answer.json()["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
            assert (await post(server, authorization="Bearer b")).status_code == 200
            assert (await server.client.get("/health")).status_code == 200

    run(test())


def test_a_rate_that_is_none_is_refused() -> None:
    with pytest.raises(OctavoError, match="'often': give a number of requests and a time"):
        RateLimit("often")


def test_other_origins_may_call_only_if_they_are_named(bundle: Path) -> None:
    async def test() -> None:
        preflight = {
            "origin": "https://here.example",
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        }
        async with serving(bundle) as server:
            answer = await post(server, origin="https://here.example")
            assert "access-control-allow-origin" not in answer.headers
            asked = await server.client.options(COMPLETIONS, headers=preflight)
            assert asked.status_code == 405
        named: dict[str, Any] = {"cors_origins": ("https://here.example",), "api_keys": ("a",)}
        async with serving(bundle, **named) as server:
            asked = await server.client.options(COMPLETIONS, headers=preflight)
            assert asked.status_code == 200
            assert asked.headers["access-control-allow-origin"] == "https://here.example"
            # A page can read why it was refused.
            answer = await post(server, origin="https://here.example")
            assert answer.status_code == 401
            assert answer.headers["access-control-allow-origin"] == "https://here.example"
            answer = await post(server, origin="https://there.example")
            assert "access-control-allow-origin" not in answer.headers

    run(test())


def test_answers_bear_the_clients_id_or_a_new_one(bundle: Path) -> None:
    async def test() -> None:
        async with serving(bundle) as server:
            answer = await post(server, x_request_id="mine-1")
            assert answer.headers["x-request-id"] == "mine-1"
            others = [await post(server), await post(server, x_request_id="x" * 200)]
            ids = [other.headers["x-request-id"] for other in others]
            assert [len(one) for one in ids] == [32, 32]
            assert ids[0] != ids[1]

    run(test())


def test_answers_are_counted_by_path_and_status(bundle: Path) -> None:
    async def test() -> None:
        async with serving(bundle) as server:
            await post(server)
            await post(server, "{")
            await server.client.get("/v1/models/m")
            await server.client.get("/made/up/by/a/client")
            text = (await server.client.get("/metrics")).text
            for labels, count in (
                ('method="POST",path="/v1/completions",status="200"', 1),
                ('method="POST",path="/v1/completions",status="400"', 1),
                ('method="GET",path="/v1/models/{name:path}",status="200"', 1),
                ('method="GET",path="none",status="404"', 1),
            ):
                assert f"octavo:http_requests_total{{{labels}}} {count}.0\n" in text
            assert 'octavo:generation_tokens_total{model_name="m"} 2.0\n' in text

    run(test())


@pytest.mark.parametrize(
    ("content", "param", "message"),
    [
        ("{", None, "the body is no JSON object of a request"),
        ("[]", None, "the body is no JSON object of a request"),
        ('{"model": "m"}', "prompt", "the field prompt is missing"),
        ('{"model": "m", "promp": "w1"}', "promp", "the field promp is unknown"),
        (
            '{"model": "m", "prompt": "w1", "stream": true, "stream_options": {"x": 1}}',
            "stream_options.x",
            "the field stream_options.x is unknown",
        ),
        (
            '{"model": "m", "prompt": "w1", "temperature": "hot"}',
            "temperature",
            "temperature holds 'hot': Input should be a valid number",
        ),
        ('{"model": "m", "prompt": {}}', "prompt", "valid string / Input should be a valid list"),
        (f'{{"model": "m", "prompt": {["w1"] * 200}}}'.replace("'", '"'), None, "200 completions"),
        ('{"model": "m", "prompt": "w1", "logprobs": 21}', "logprobs", "at most 20"),
        ('{"model": "m", "prompt": "\\ud800"}', None, "lone surrogate"),
        ('{"model": "\\ud800", "prompt": "w1"}', "model", "is not served here: ask for m"),
        ('{"model": "m", "prompt": "w1", "priority": 1}', None, "scheduling_policy"),
        (
            '{"model": "m", "prompt": "w1", "stream_options": {}}',
            "stream_options",
            "stream to true",
        ),
        ('{"model": "m", "prompt": "w1", "stop": [' + '"a",' * 64 + '"a"]}', "stop", "at most 64"),
    ],
)
def test_a_wrong_body_is_told_what_is_wrong(
    bundle: Path, content: str, param: str | None, message: str
) -> None:
    async def test() -> None:
        async with serving(bundle) as server:
            refused = await post(server, content)
            error = refused.json()["error"]
            assert refused.status_code == (404 if param == "model" else 400)
            assert (error["type"], error["param"]) == ("invalid_request_error", param)
            assert message in error["message"]

    run(test())
