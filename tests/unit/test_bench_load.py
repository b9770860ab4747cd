"""The load tool: its figures worked out by hand, and servers that do whatever servers do."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from octavo.graphs.errors import OctavoError
from octavo.tools.bench.load.arrivals import arrival_times, moments_of_leaving, prompts
from octavo.tools.bench.load.command import read_scenario
from octavo.tools.bench.load.events import EventReader
from octavo.tools.bench.load.plan import LoadPlan, Objectives
from octavo.tools.bench.load.plot import picture
from octavo.tools.bench.load.protocols import StreamError, make_protocol
from octavo.tools.bench.load.records import Record
from octavo.tools.bench.load.report import LoadResult, summary
from octavo.tools.bench.load.runner import run_load
from octavo.tools.main import app

URL = "http://127.0.0.1:1"


def plan(**values: Any) -> LoadPlan:
    return LoadPlan(**{"url": URL, "model": "m", **values})


# Plans


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"num_requests": 0}, "num_requests is 0"),
        ({"output_len": 0}, "output_len is 0"),
        ({"input_len": 4, "prefix_len": 5}, "prefix_len is 5"),
        ({"request_rate": 0}, "request_rate is 0"),
        ({"request_rate": math.nan}, "request_rate is nan"),
        ({"concurrency": 0}, "concurrency is 0"),
        ({"concurrency": 2, "request_rate": 3}, "give one of them"),
        ({"disconnect_share": 1.5}, "disconnect_share is 1.5"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(OctavoError, match=complaint):
        plan(**values)


def test_objectives_are_read_with_their_units() -> None:
    assert Objectives.parse("ttft=500ms,e2e=1.5s") == Objectives(ttft=0.5, e2e=1.5)
    for text in ("ttft=5", "speed=5ms", "ttft", ""):
        with pytest.raises(OctavoError, match="it must be one of ttft, tpot and e2e"):
            Objectives.parse(text)


def test_constant_arrivals_are_exact_and_random_ones_have_the_rate() -> None:
    assert arrival_times(plan(num_requests=4, request_rate=8, arrivals="constant")) == [
        0.0, 0.125, 0.25, 0.375,
    ]  # fmt: skip
    assert arrival_times(plan(num_requests=3)) == [0.0, 0.0, 0.0]
    times = arrival_times(plan(num_requests=20_001, request_rate=50, seed=3))
    gaps = np.diff(times)
    # Of exponential gaps mean and deviation are both 1/50; 20,000 of them are within 3 %.
    assert gaps.mean() == pytest.approx(0.02, rel=0.03)
    assert gaps.std() == pytest.approx(0.02, rel=0.03)
    assert times == arrival_times(plan(num_requests=20_001, request_rate=50, seed=3))


def test_prompts_share_their_first_words_only() -> None:
    made = prompts(plan(num_requests=5, num_warmup=1, input_len=12, prefix_len=5))
    words = [text.split() for text in made]
    assert [len(one) for one in words] == [12] * 6
    assert len({tuple(one[:5]) for one in words}) == 1
    assert len({tuple(one[5:]) for one in words}) == 6
    assert prompts(plan(num_requests=3, num_warmup=0, prompts=("a", "b"))) == ["a", "b", "a"]


def test_a_share_of_the_requests_is_left() -> None:
    moments = moments_of_leaving(plan(num_requests=4000, disconnect_share=0.25, output_len=10))
    left = [moment for moment in moments if moment is not None]
    assert len(left) == pytest.approx(1000, rel=0.1)
    assert set(left) == set(range(10))
    assert moments_of_leaving(plan(num_requests=3)) == [None] * 3


# Events


@given(
    events=st.lists(st.text("ab{}:é ", min_size=1).map(str.encode), max_size=6),
    cuts=st.lists(st.integers(0, 200)),
    end=st.sampled_from([b"\n", b"\r\n"]),
)
def test_events_are_whole_wherever_they_are_cut(
    events: list[bytes], cuts: list[int], end: bytes
) -> None:
    stream = b"".join(b"data: " + event + end + end for event in events)
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    # A carriage return is never cut from its line feed: servers write whole events.
    edges = [edge for edge in edges if stream[edge - 1 : edge + 1] != b"\r\n"]
    reader = EventReader()
    found = [event for start, stop in pairwise(edges) for event in reader.push(stream[start:stop])]
    assert found == events


def test_comments_and_other_fields_are_no_data() -> None:
    reader = EventReader()
    assert reader.push(b": hello\n\nevent: x\ndata: 1\ndata:2\n\n") == [b"", b"1\n2"]


@pytest.mark.parametrize("kind", ["openai", "triton"])
def test_tokens_are_counted_as_the_server_counts_them(kind: Any) -> None:
    protocol = make_protocol(plan(protocol=kind), "m")
    if kind == "openai":
        events = [b'{"usage":{"completion_tokens":1}}', b'{"usage":{"completion_tokens": 4}}']
    else:
        events = [b'{"num_output_tokens":1}', b'{"num_output_tokens": 3}']
    count = 0
    counts = []
    for event in events:
        count = protocol.count(event, count)
        counts.append(count)
    assert counts == [1, 4]
    for wrong in (b'{"error":{"message":"no"}}', b"{broken", b'{"text": 1}'):
        with pytest.raises(StreamError):
            protocol.count(wrong, 0)
    chunks = make_protocol(plan(protocol=kind, count_chunks=True), "m")
    assert chunks.count(b'{"text":"a"}', 6) == 7


# Figures


def record(intended: float, *chunks: tuple[float, int], **values: Any) -> Record:
    ended = chunks[-1][0] if chunks else intended
    made = Record(intended, sent=intended, ended=ended, chunks=list(chunks), outcome="finished")
    for name, value in values.items():
        setattr(made, name, value)
    return made


def test_a_chunk_of_several_tokens_shares_its_time() -> None:
    # 1 token after 2 s, 3 more after 3 s more, 1 more after half a second.
    one = record(10.0, (12.0, 1), (15.0, 4), (15.5, 5))
    assert one.ttft == 2.0
    assert one.gaps == [1.0, 1.0, 1.0, 0.5]
    assert one.tpot == 3.5 / 4
    assert one.e2e == 5.5
    assert record(0.0, (1.0, 2)).tpot == 0.0


def test_percentiles_are_values_that_occurred() -> None:
    assert summary([]) is None
    assert summary([number / 1000 for number in range(1, 101)]) == {
        "mean": 50.5, "p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "max": 100.0,
    }  # fmt: skip


def test_goodput_counts_what_kept_every_objective() -> None:
    wanted = Objectives(ttft=1.0, tpot=0.5, e2e=4.0)
    records = (
        record(0.0, (1.0, 1), (2.0, 3)),  # good: ttft 1, tpot 0.5, e2e 2
        record(0.0, (1.1, 1), (2.0, 3)),  # first token late
        record(0.0, (1.0, 1), (2.1, 3)),  # tokens slow
        record(0.0, (1.0, 1), (4.5, 20)),  # end late
        record(0.0, outcome="refused", error="429"),
        record(0.0, (0.1, 1), outcome="left"),
        record(0.0, outcome="failed", error="500: no"),
    )
    result = LoadResult(plan(objectives=wanted, num_requests=7), records, 10.0, 1.0)
    figures = result.as_json()
    assert figures["requests"] == {"finished": 4, "refused": 1, "left": 1, "failed": 1}
    assert figures["errors"] == {"500: no": 1}
    assert figures["goodput"] == {"requests_per_s": 0.1, "share": 1 / 7}
    assert figures["request_throughput"] == 0.4
    assert figures["output_throughput"] == (3 + 3 + 3 + 20 + 1) / 10
    assert figures["latency_ms"]["ttft"]["max"] == pytest.approx(1100)
    assert result.warning is None
    busy = LoadResult(plan(num_requests=7), records, 10.0, 8.0)
    assert "80% of a core" in str(busy.warning)


def test_pictures_have_a_line_for_what_they_show() -> None:
    one = record(0.0, (1.0, 1), (2.0, 3))
    runs = [LoadResult(plan(request_rate=rate), (one,), 1.0, 0.1) for rate in (1.0, 2.0)]
    drawn = picture(runs)
    assert drawn.count("<polyline") == 6
    assert picture(runs[:1]).count("<polyline") == 2


def test_scenarios_are_plans(tmp_path: Path) -> None:
    for name in ("steady", "streams_32", "shared_prefix"):
        assert plan(**read_scenario(name)).num_requests > 1
    file = tmp_path / "mine.json"
    file.write_text('{"num_request": 3}')
    with pytest.raises(OctavoError, match=r"has \['num_request'\]"):
        read_scenario(str(file))
    with pytest.raises(OctavoError, match="cannot be read"):
        read_scenario("nowhere")


# Servers

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def server(handler: Handler, path: str = "/v1/completions") -> AsyncIterator[str]:
    application = web.Application()
    application.router.add_post(path, handler)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield str(runner.addresses[0][1])
    finally:
        await runner.cleanup()


async def stream(
    request: web.Request, events: list[str], *, cut: bool = False
) -> web.StreamResponse:
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await answer.prepare(request)
    for event in events:
        await answer.write(f"data: {event}\n\n".encode())
        await asyncio.sleep(0)
    if cut:
        assert request.transport is not None
        request.transport.abort()
    return answer


def chunk(num_tokens: int) -> str:
    return json.dumps({"choices": [{"text": "a"}], "usage": {"completion_tokens": num_tokens}})


def run(handler: Handler, **values: Any) -> LoadResult:
    async def test() -> LoadResult:
        path = values.pop("path", "/v1/completions")
        async with server(handler, path) as port:
            options = {"output_len": 4, "num_requests": 6, **values}
            return await run_load(plan(**{**options, "url": f"http://127.0.0.1:{port}"}))

    return asyncio.run(asyncio.wait_for(test(), 30))


@pytest.mark.parametrize("values", [{}, {"concurrency": 2}, {"request_rate": 1000}])
def test_every_request_is_sent_once_and_counted(values: dict[str, Any]) -> None:
    seen: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        assert (body["max_tokens"], body["ignore_eos"], body["stream"]) == (4, True, True)
        assert request.headers["Authorization"] == "Bearer key"
        seen.append(body["prompt"])
        return await stream(request, [chunk(1), chunk(3), chunk(4), "[DONE]"])

    result = run(handler, api_key="key", **values)
    assert result.as_json()["requests"]["finished"] == 6
    assert sorted(seen) == sorted(prompts(result.plan))
    assert {record.num_tokens for record in result.records} == {4}


def test_whatever_goes_wrong_is_told_apart() -> None:
    """After two warm-up requests: refused, failed, cut off, broken, an error, too short."""
    count = iter(range(100))

    async def handler(request: web.Request) -> web.StreamResponse:
        match next(count) - 2:
            case 0:
                return web.Response(status=429, text="busy")
            case 1:
                return web.Response(status=500, text="oh")
            case 2:
                return await stream(request, [chunk(1)], cut=True)
            case 3:
                return await stream(request, [chunk(1), "{half"])
            case 4:
                return await stream(request, [chunk(1), '{"error": {"message": "died"}}'])
            case 5:
                return await stream(request, [chunk(3), "[DONE]"])
        return await stream(request, [chunk(4), "[DONE]"])

    result = run(handler, concurrency=1, num_requests=7)
    outcomes = [record.outcome for record in result.records]
    assert outcomes == ["refused", *["failed"] * 5, "finished"]
    errors = [str(record.error) for record in result.records[1:6]]
    for error, part in zip(
        errors, ["500: oh", "Client", "no JSON object", "died", "after 3 tokens"], strict=True
    ):
        assert part in error


def test_left_requests_are_no_errors() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return await stream(request, [*map(chunk, range(1, 201)), "[DONE]"])

    result = run(handler, output_len=200, disconnect_share=1.0, num_requests=20)
    assert {record.outcome for record in result.records} == {"left"}
    assert all(record.num_tokens < 200 for record in result.records[:10])


def test_triton_is_asked_as_its_model_wants() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        assert json.loads(body["sampling_parameters"])["max_tokens"] == 4
        assert (body["stream"], body["return_num_output_tokens"]) == (True, True)
        pieces = [json.dumps({"text_output": "a", "num_output_tokens": n}) for n in (1, 3)]
        return await stream(request, pieces)

    result = run(handler, protocol="triton", path="/v2/models/m/generate_stream")
    assert result.as_json()["requests"]["finished"] == 6


def test_a_server_that_refuses_the_warm_up_is_told() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(status=404, text="no such model")

    with pytest.raises(OctavoError, match="does not answer as it should: 404: no such model"):
        run(handler)


def test_the_command_says_what_is_wrong() -> None:
    result = CliRunner().invoke(app, ["bench", "serve", "--url", "nowhere"])
    assert result.exit_code == 1
    assert "give one such as http://" in result.stderr
    result = CliRunner().invoke(app, ["bench", "serve", "--url", URL])
    assert result.exit_code == 1
    assert "cannot be reached" in result.stderr
    result = CliRunner().invoke(app, ["bench", "serve", "--url", URL, "--sweep", "1,x"])
    assert result.exit_code == 2
