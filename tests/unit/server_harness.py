"""The server in this process, its engine in a thread: requests without a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx2
from fastapi import FastAPI

from octavo.runtime.async_llm import AsyncLLM
from octavo.tools.server.application import make_application
from octavo.tools.server.options import ServerOptions
from octavo.tools.server.service import Service

T = TypeVar("T")
MODEL = "m"
JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class Server:
    """`client` reads answers whole, streamed ones too."""

    service: Service
    app: FastAPI
    client: httpx2.AsyncClient

    async def post(self, path: str, **body: Any) -> httpx2.Response:
        """With the model's name, unless another one is given."""
        text = json.dumps({"model": MODEL, **body})
        return await self.client.post(path, content=text, headers=JSON)

    async def complete(self, prompt: Any, **body: Any) -> Any:
        """The answer of /v1/completions, greedy unless the body says otherwise."""
        return await self._answer("/v1/completions", {"prompt": prompt, **body})

    async def chat(self, text: str, **body: Any) -> Any:
        """The answer to one message."""
        messages = [{"role": "user", "content": text}]
        return await self._answer("/v1/chat/completions", {"messages": messages, **body})

    async def refusal(self, path: str, **body: Any) -> tuple[int, Any]:
        """The status and the error object."""
        response = await self.post(path, **body)
        return response.status_code, response.json()["error"]

    async def _answer(self, path: str, body: dict[str, Any]) -> Any:
        response = await self.post(path, **{"temperature": 0, **body})
        assert response.status_code == 200, response.text
        return events(response.text) if body.get("stream") else response.json()

    async def open_then_leave(self, path: str, num_parts: int, **body: Any) -> list[bytes]:
        """Leaves once `num_parts` parts of the answer's body have come; returns them."""
        content = json.dumps({"model": MODEL, **body}).encode()
        requests = [{"type": "http.request", "body": content, "more_body": False}]
        left = asyncio.Event()
        parts: list[bytes] = []

        async def receive() -> dict[str, Any]:
            if requests:
                return requests.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                parts.append(message["body"])
                if len(parts) >= num_parts:
                    left.set()
                    await asyncio.sleep(0)

        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
            "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"",
            "root_path": "", "headers": [(b"content-type", b"application/json")],
            "client": ("test", 1), "server": ("test", 80),
        }  # fmt: skip
        if not num_parts:
            left.set()
        await self.app(scope, receive, send)
        return parts

    async def gauges(self) -> tuple[float, float, float]:
        """Running and waiting requests, and the share of the cache that is in use."""
        snapshot: Any = await self.service.llm.metrics()
        return (
            snapshot["num_requests_running"],
            snapshot["num_requests_waiting"],
            snapshot["kv_cache_usage_perc"],
        )


@asynccontextmanager
async def serving(
    bundle: Path, *, llm: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[Server]:
    """`llm`: options of `AsyncLLM`; the others are the server's."""
    engine = AsyncLLM(bundle, engine="thread", **(llm or {}))
    service = Service(engine, ServerOptions(**{"model_names": (MODEL,), **options}))
    await service.start()
    app = make_application(service)
    try:
        transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://server") as client:
            yield Server(service, app, client)
    finally:
        await service.stop()


def run(test: Coroutine[Any, Any, T]) -> T:
    """What hangs fails."""
    return asyncio.run(asyncio.wait_for(test, 60))


def events(text: str) -> list[Any]:
    """The objects of server-sent events, which end with [DONE]."""
    lines = text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
