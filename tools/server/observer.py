"""Counts answers, and names each so that it can be found in logs."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterator

from prometheus_client import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.runtime.metrics.definitions import PREFIX

_LONGEST_ID = 128  # characters
_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "POST"})


class HttpMetrics:
    """What Prometheus is told of the server itself; the engine has its own metrics."""

    def __init__(self) -> None:
        self._answers: Counter[tuple[str, str, str]] = Counter()

    def count(self, scope: Scope, status: int) -> None:
        # The path as the application declares it: clients can not make up label values.
        path = getattr(scope.get("route"), "path", "none")
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._answers[method, path, str(status)] += 1

    def collect(self) -> Iterator[Metric]:
        """For prometheus_client."""
        family = CounterMetricFamily(
            f"{PREFIX}http_requests",
            "Requests that were answered, streams when they begin.",
            labels=["method", "path", "status"],
        )
        for labels, count in self._answers.items():
            family.add_metric(labels, count)
        yield family

    def exposition(self) -> str:
        return generate_latest(self).decode()


class Observer:
    """ASGI middleware, the outermost one."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(Headers(scope=scope)).encode()

        async def send_observed(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
                self._metrics.count(scope, message["status"])
            await send(message)

        await self._app(scope, receive, send_observed)


def _request_id(headers: Headers) -> str:
    """The client's own, or a new one."""
    given = headers.get("x-request-id", "")
    usable = given.isascii() and given.isprintable() and 0 < len(given) <= _LONGEST_ID
    return given if usable else uuid.uuid4().hex
