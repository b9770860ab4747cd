"""Answers that take a while: whoever leaves before they are there ends the work on them."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.tools.server.errors import ApiError, api_error

_logger = logging.getLogger(__name__)

# Made once: every token passes through it.
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the pieces
]


class JsonReply(Response):
    """One JSON object, once `answer` has made it, or its error."""

    def __init__(self, answer: Coroutine[Any, Any, Mapping[str, Any]]) -> None:
        super().__init__()
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _while_connected(receive, self._reply(scope, receive, send))

    async def _reply(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = _json(await self._answer)
        except Exception as error:
            await _logged(error).response()(scope, receive, send)
        else:
            await Response(body, media_type="application/json")(scope, receive, send)


class EventStream(Response):
    """Server-sent events, each a JSON object, and `[DONE]` at their end.

    The status waits for the first event: what fails before it is an ordinary error. What fails
    later is an event that holds an error object, as OpenAI's clients expect it.
    """

    def __init__(self, events: AsyncGenerator[Mapping[str, Any], None]) -> None:
        super().__init__()
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _while_connected(receive, self._reply(scope, receive, send))

    async def _reply(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events) as events:
            try:
                first = await anext(events)
            except Exception as error:
                await _logged(error).response()(scope, receive, send)
                return
            await send(
                {"type": "http.response.start", "status": 200, "headers": _EVENT_STREAM_HEADERS}
            )
            await _send_event(send, _json(first))
            try:
                async for event in events:
                    await _send_event(send, _json(event))
            except Exception as error:
                await _send_event(send, json.dumps(_logged(error).body()).encode())
            last = b"data: [DONE]\n\n"
            await send({"type": "http.response.body", "body": last, "more_body": False})


async def _send_event(send: Send, data: bytes) -> None:
    body = b"data: %b\n\n" % data
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Cancels `work` when the client leaves."""
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _json(value: Mapping[str, Any]) -> bytes:
    return _ENCODER.encode(value).encode("utf-8", "replace")


def _logged(error: Exception) -> ApiError:
    answer = api_error(error)
    if answer.status_code == 500:
        _logger.error("a request failed", exc_info=error)
    return answer
