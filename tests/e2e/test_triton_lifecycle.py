"""Clients that leave, engines that die, servers that end: a real Triton Inference Server."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from octavo.backends import null
from octavo.backends.manifest import Limits
from octavo.runtime.metrics.definitions import METRICS
from octavo.tools.triton.child_metrics import VLLM_NAMES, exposed_metrics
from tests.e2e import triton_grpc as grpc
from tests.e2e.triton_server import ROOT, Server, export, require_triton, start, triton_server
from tests.unit.word_bundles import VOCAB_SIZE, continuation

PROMPT = [3, 14, 15]
# One request at a time, which can go on for long: that another one runs shows that it is gone.
LIMITS = Limits(max_model_len=1 << 17, max_num_seqs=1, max_num_batched_tokens=64, block_size=16)
MAX_OPEN_REQUESTS = 3
SMALL_CACHE = ("--kv-cache-memory", "4MiB")
FOREVER = {"input_ids": PROMPT, "max_tokens": 100_000, "stream": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_triton()
    folder = tmp_path_factory.mktemp("triton")
    engine = null.write_engine(folder / "single", vocab_size=VOCAB_SIZE, limits=LIMITS)
    limit = ("--max-open-requests", str(MAX_OPEN_REQUESTS))
    export(engine, folder / "repository", *SMALL_CACHE, *limit)
    return folder / "repository"


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Server]:
    with triton_server(repository, repository.parent / "server.log") as running:
        yield running


@pytest.fixture(scope="module")
def pair_server(tmp_path_factory: pytest.TempPathFactory, null_engine: Path) -> Iterator[Server]:
    """Of two instances. At its end Triton 2.51 sometimes waits for nothing until it gives up."""
    require_triton()
    folder = tmp_path_factory.mktemp("pair")
    instances = ("--name", "pair", "--instances", "2")
    export(null_engine, folder / "repository", *SMALL_CACHE, *instances)
    options = {"exit_timeout_secs": "3"}
    with triton_server(folder / "repository", folder / "server.log", **options) as running:
        yield running


@asynccontextmanager
async def cancelled_call(server: Server) -> AsyncIterator[Callable[[], Any]]:
    async with grpc.client(server) as connection:
        stream = grpc.responses(connection, "single", **FOREVER)
        await anext(stream)
        yield stream.cancel


@asynccontextmanager
async def killed_client(server: Server) -> AsyncIterator[Callable[[], Any]]:
    code = f"""
    import asyncio
    from tests.e2e import triton_grpc as grpc
    from tests.e2e.triton_server import Server

    async def main():
        async with grpc.client(Server(None, 0, {server.grpc}, 0, None)) as connection:
            async for _ in grpc.responses(connection, "single", **{FOREVER!r}):
                print("running", flush=True)

    asyncio.run(main())
    """
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(code), cwd=ROOT, stdout=subprocess.PIPE
    )
    assert client.stdout is not None
    assert await client.stdout.readline() == b"running\n"
    yield client.kill
    await client.communicate()


@asynccontextmanager
async def closed_stream(server: Server) -> AsyncIterator[Callable[[], Any]]:
    """/generate_stream over a socket that is closed."""
    body = json.dumps({**FOREVER, "input_ids": PROMPT}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.http)
    writer.write(
        b"POST /v2/models/single/generate_stream HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    await reader.readuntil(b"data: ")
    yield writer.close


@pytest.mark.parametrize("running_request", [cancelled_call, killed_client, closed_stream])
def test_a_client_that_leaves_frees_its_blocks_within_100_ms(
    server: Server, running_request: Any
) -> None:
    """Another request takes its place, which has room for one. The best of five tries counts."""

    async def seconds_until_replaced() -> float:
        async with running_request(server) as leave:
            waiting = asyncio.create_task(
                grpc.stream(server, "single", input_ids=[5], max_tokens=1, return_token_ids=True)
            )
            await asyncio.sleep(0.2)
            assert not waiting.done()
            leave()
            left = time.perf_counter()
            (response,) = await waiting
            assert response.error is None
            return time.perf_counter() - left

    async def best() -> float:
        return min([await seconds_until_replaced() for _ in range(5)])

    assert asyncio.run(best()) < 0.1
    server.wait_until(
        "an empty cache", lambda: server.metric("octavo:kv_cache_usage_perc", model="single") == 0
    )
    assert server.metric("octavo:num_requests_running", model="single") == 0


def test_a_request_beyond_the_limit_is_refused_and_the_others_go_on(server: Server) -> None:
    async def refusal() -> str | None:
        async with cancelled_call(server) as leave:
            waiting = [
                asyncio.create_task(grpc.stream(server, "single", input_ids=[5], max_tokens=1))
                for _ in range(MAX_OPEN_REQUESTS - 1)
            ]
            await asyncio.sleep(0.2)
            (refused,) = await grpc.stream(server, "single", input_ids=[5], max_tokens=1)
            leave()
            for one in await asyncio.gather(*waiting):
                assert one[-1].error is None
            return refused.error

    assert asyncio.run(refusal()) == (
        "3 requests are open, max_open_requests is 3: try again later"
    )


def test_two_instances_have_an_engine_each_and_share_the_requests(pair_server: Server) -> None:
    assert len(pair_server.engines("pair")) == 2
    prompts = [[one, 1, 1] for one in range(1, 41)]
    found = grpc.run_all(
        *(
            grpc.stream(
                pair_server,
                "pair",
                input_ids=prompt,
                max_tokens=10,
                temperature=0.0,
                return_token_ids=True,
            )
            for prompt in prompts
        )
    )
    for prompt, (only,) in zip(prompts, found, strict=True):
        assert json.loads(only.outputs["token_ids"][0]) == continuation(prompt, 10)
    pair_server.wait_until("all tokens", lambda: generated(pair_server, "pair") == 400)
    each = [
        pair_server.metric("octavo:generation_tokens_total", model="pair", instance=f"pair_0_{i}")
        for i in range(2)
    ]
    assert min(each) > 0


def generated(server: Server, model: str) -> float:
    return server.metric("octavo:generation_tokens_total", model=model)


def test_the_metrics_port_has_every_metric_and_those_of_the_vllm_backend(
    pair_server: Server,
) -> None:
    before = pair_server.metric(
        "octavo:request_success_total", model="pair", finished_reason="length"
    )
    (found,) = grpc.run_all(grpc.stream(pair_server, "pair", input_ids=[1, 2, 3], max_tokens=4))
    assert found[-1].final
    pair_server.wait_until(
        "a counted request",
        lambda: (
            pair_server.metric(
                "octavo:request_success_total", model="pair", finished_reason="length"
            )
            == before + 1
        ),
    )
    for metric in exposed_metrics():
        suffix = "_count" if metric["kind"] == "histogram" else ""
        for name in metric["exposed"]:
            assert pair_server.metric(name + suffix, model="pair", version="1") >= 0
    assert {name for metric in exposed_metrics() for name in metric["exposed"]} > set(VLLM_NAMES)
    assert len(exposed_metrics()) == len(METRICS)
    count = pair_server.metric("octavo:time_to_first_token_seconds_count", model="pair")
    infinite = pair_server.metric(
        "octavo:time_to_first_token_seconds_bucket", model="pair", le="+Inf"
    )
    assert count == infinite > 0
    assert pair_server.metric("octavo:engine_up", model="pair") == 2  # instances


def test_a_killed_engine_ends_its_requests_and_is_replaced(server: Server) -> None:
    (engine,) = server.engines("single")
    starts = server.metric("octavo:engine_starts_total", model="single")

    async def last_response() -> grpc.Response:
        async with grpc.client(server) as connection:
            last = None
            async for result, error in grpc.responses(connection, "single", **FOREVER):
                if last is None:
                    engine.kill()
                last = grpc.read(result, error)
                if last.final:
                    return last
        raise AssertionError("the stream ended without a last response")

    assert asyncio.run(last_response()).error == (
        f"the engine process {engine.pid} was killed by signal 9 while "
        "the request was running: send it again"
    )
    server.wait_until(
        "the health of a dead engine",
        lambda: server.metric("octavo:engine_up", model="single") == 0,
    )
    (refused,) = grpc.run_all(grpc.stream(server, "single", input_ids=PROMPT, max_tokens=2))
    assert str(refused[0].error).endswith("killed by signal 9: send the request again later")
    server.wait_until(
        "the health of a new engine",
        lambda: server.metric("octavo:engine_up", model="single") == 1,
    )
    (found,) = grpc.run_all(
        grpc.stream(
            server,
            "single",
            input_ids=PROMPT,
            max_tokens=9,
            temperature=0.0,
            return_token_ids=True,
        )
    )
    assert json.loads(found[0].outputs["token_ids"][0]) == continuation(PROMPT, 9)
    assert server.metric("octavo:engine_starts_total", model="single") == starts + 1
    assert server.is_ready("single")


def test_an_engine_that_is_given_up_makes_its_model_not_ready_until_it_is_loaded_again(
    tmp_path: Path, null_engine: Path
) -> None:
    """Where the server is told which models to load, as the vLLM backend does it."""
    export(null_engine, tmp_path / "repository", *SMALL_CACHE)
    settings = tmp_path / "repository" / "null" / "1" / "model.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "max_restarts": 0}))
    options = {"model_control_mode": "explicit", "load_model": "null"}
    with triton_server(tmp_path / "repository", tmp_path / "server.log", **options) as explicit:
        (engine,) = explicit.engines("null")
        engine.kill()
        explicit.wait_until("a model that is not ready", lambda: not explicit.is_ready("null"))
        status, text = explicit.load("null")
        assert status == 200, text
        assert explicit.is_ready("null")
        answer = explicit.generate("null", input_ids=[1, 2], max_tokens=1, return_token_ids=True)
        assert len(json.loads(answer["token_ids"])) == 1


def test_sigterm_lets_an_open_stream_end_and_leaves_no_process(
    repository: Path, tmp_path: Path
) -> None:
    tokens = 2_000
    with triton_server(repository, tmp_path / "server.log") as ending:
        started = ending.descendants()

        async def stream() -> list[grpc.Response]:
            found: list[grpc.Response] = []
            async with grpc.client(ending) as connection:
                request = {**FOREVER, "max_tokens": tokens, "temperature": 0.0}
                async for result, error in grpc.responses(connection, "single", **request):
                    if not found:
                        ending.process.send_signal(signal.SIGTERM)
                    found.append(grpc.read(result, error))
                    if found[-1].final:
                        break
            return found

        pieces = asyncio.run(stream())
        assert ending.process.wait(timeout=30) == 0
        _, left = psutil.wait_procs(started, timeout=10)
        assert left == []
    ids = [one for piece in pieces for one in json.loads(piece.outputs["token_ids"][0])]
    assert ids == continuation(PROMPT, tokens)


def test_a_killed_server_leaves_no_process(repository: Path, tmp_path: Path) -> None:
    with triton_server(repository, tmp_path / "server.log") as killed:
        started = killed.descendants()
        assert len(started) == 2  # the model's process and its engine's
        killed.process.kill()
        killed.process.wait()
        _, left = psutil.wait_procs(started, timeout=20)
        assert left == []


def test_an_engine_that_cannot_be_loaded_is_named_in_the_log(
    tmp_path: Path, null_engine: Path
) -> None:
    require_triton()
    export(null_engine, tmp_path / "repository", *SMALL_CACHE)
    (tmp_path / "repository" / "null" / "1" / "engine" / "model.null").write_text("vocab_size 5\n")
    log = tmp_path / "server.log"
    with pytest.raises(RuntimeError, match="failed to load all models"):
        start(tmp_path / "repository", log)
    assert "model.null has 13 bytes, the manifest says 14" in log.read_text()
