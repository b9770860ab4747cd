"""Sends the requests of a plan and records what comes back."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from octavo.graphs.errors import OctavoError
from octavo.tools.bench.load.arrivals import arrival_times, moments_of_leaving, prompts
from octavo.tools.bench.load.events import EventReader
from octavo.tools.bench.load.plan import LoadPlan
from octavo.tools.bench.load.protocols import ServerProtocol, StreamError, make_protocol
from octavo.tools.bench.load.records import Record
from octavo.tools.bench.load.report import LoadResult

if TYPE_CHECKING:
    import aiohttp

_LONGEST_ERROR = 200  # characters


async def run_load(plan: LoadPlan) -> LoadResult:
    """Raises OctavoError if the server cannot be reached or refuses the warm-up."""
    try:
        import aiohttp
    except ImportError as error:
        raise OctavoError(f"a load needs aiohttp ({error}): install `octavo[bench]`") from error
    if urlsplit(plan.url).scheme not in ("http", "https"):
        raise OctavoError(f"the url is {plan.url!r}: give one such as http://127.0.0.1:8000")
    headers = {"Content-Type": "application/json"}
    if plan.api_key is not None:
        headers["Authorization"] = f"Bearer {plan.api_key}"
    async with aiohttp.ClientSession(
        plan.url.rstrip("/"),
        connector=aiohttp.TCPConnector(limit=0),
        headers=headers,
        timeout=aiohttp.ClientTimeout(total=plan.timeout),
    ) as session:
        try:
            model = plan.model or await _first_model(session, plan)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise OctavoError(f"{plan.url} cannot be reached ({error}): start the server") from None
        return await _Run(plan, session, make_protocol(plan, model)).run()


async def _first_model(session: aiohttp.ClientSession, plan: LoadPlan) -> str:
    if plan.protocol == "triton":
        raise OctavoError("the model's name is not known: give --model")
    async with session.get("/v1/models") as answer:
        text = await answer.text()
        try:
            return str(json.loads(text)["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise OctavoError(
                f"{plan.url}/v1/models answers {answer.status}: {text[:_LONGEST_ERROR]}"
            ) from None


class _Run:
    def __init__(
        self, plan: LoadPlan, session: aiohttp.ClientSession, protocol: ServerProtocol
    ) -> None:
        self._plan = plan
        self._session = session
        self._protocol = protocol
        self._start = 0.0
        self._prompts = prompts(plan)
        self._leaving = moments_of_leaving(plan)

    async def run(self) -> LoadResult:
        plan = self._plan
        self._start = time.perf_counter()
        for number in range(plan.num_warmup):
            record = Record(0.0)
            await self._request(record, self._prompts[number], None)
            if record.outcome != "finished":
                raise OctavoError(f"the server does not answer as it should: {record.error}")
        records = [Record(intended) for intended in arrival_times(plan)]
        cpu = time.process_time()
        self._start = time.perf_counter()
        if plan.concurrency is None:
            await asyncio.gather(*(self._open_loop(*numbered) for numbered in enumerate(records)))
        else:
            left = iter(enumerate(records))
            workers = range(plan.concurrency)
            await asyncio.gather(*(self._closed_loop(left) for _ in workers))
        return LoadResult(
            plan=plan,
            records=tuple(records),
            duration=self._now(),
            client_cpu=time.process_time() - cpu,
        )

    def _now(self) -> float:
        return time.perf_counter() - self._start

    async def _open_loop(self, number: int, record: Record) -> None:
        await asyncio.sleep(max(0.0, record.intended - self._now()))
        await self._send(number, record)

    async def _closed_loop(self, left: enumerate[Record]) -> None:
        for number, record in left:
            record.intended = self._now()
            await self._send(number, record)

    async def _send(self, number: int, record: Record) -> None:
        prompt = self._prompts[self._plan.num_warmup + number]
        await self._request(record, prompt, self._leaving[number])

    async def _request(self, record: Record, prompt: str, leave_after: int | None) -> None:
        import aiohttp

        record.sent = self._now()
        try:
            await self._stream(record, prompt, math.inf if leave_after is None else leave_after)
        except (StreamError, aiohttp.ClientError, TimeoutError, OSError) as error:
            record.outcome = "failed"
            record.error = f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]
        record.ended = self._now()

    async def _stream(self, record: Record, prompt: str, leave_after: float) -> None:
        protocol = self._protocol
        async with self._session.post(protocol.path(), data=protocol.body(prompt)) as answer:
            if answer.status != 200:
                text = await answer.text()
                refused = answer.status == 429 or "UNAVAILABLE" in text
                record.outcome = "refused" if refused else "failed"
                record.error = f"{answer.status}: {text[:_LONGEST_ERROR]}"
                return
            read = _Events(record, protocol, self._now)
            async for data in answer.content.iter_any():
                if read.push(data):
                    break
                if record.num_tokens > leave_after:
                    record.outcome = "left"
                    answer.close()
                    return
        if record.num_tokens < self._plan.output_len:
            raise StreamError(f"the stream ended after {record.num_tokens} tokens")
        record.outcome = "finished"


class _Events:
    """Notes when tokens come."""

    def __init__(self, record: Record, protocol: ServerProtocol, now: Callable[[], float]) -> None:
        self._record = record
        self._protocol = protocol
        self._now = now
        self._reader = EventReader()

    def push(self, data: bytes) -> bool:
        """True at the last event."""
        record, protocol = self._record, self._protocol
        num_tokens = num_before = record.num_tokens
        last = False
        for event in self._reader.push(data):
            num_tokens = protocol.count(event, num_tokens)
            last = last or protocol.is_last(event)
        if num_tokens > num_before:
            record.chunks.append((self._now(), num_tokens))
        return last
