"""What stands before every endpoint: keys, rates and the size of what is sent."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.graphs.errors import OctavoError
from octavo.tools.server.errors import ApiError, busy
from octavo.tools.server.options import ServerOptions

if TYPE_CHECKING:
    from limits import RateLimitItem

# For orchestrators, scrapers and browsers, which bring no key; they start nothing.
PAGE_PATH = "/page"  # and below it: what the page loads
OPEN_PATHS = frozenset({"/", "/health", "/ready", "/metrics", "/openapi.json"})


class Guard:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, options: ServerOptions, rate: RateLimit | None) -> None:
        self._app = app
        self._options = options
        self._keys = [_digest(key) for key in options.api_keys]
        self._rate = rate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_open(scope["path"]):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            key = self._check_key(headers)
            if self._rate is not None:
                self._rate.check(key or _address(scope))
            if scope["method"] == "POST":
                body = await self._read(headers, receive)
                if body is None:
                    return
                receive = _replay(body, receive)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check_key(self, headers: Headers) -> str | None:
        """The digest of the request's key, None where none is needed."""
        if not self._keys:
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        digest = _digest(given.strip())
        # All are compared, each in the same time whatever it has in common with the right one.
        known = [hmac.compare_digest(digest, key) for key in self._keys]
        if scheme.lower() != "bearer" or not any(known):
            raise ApiError(
                401,
                "the API key is missing or wrong: send it as Authorization: Bearer KEY",
                kind="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return digest

    async def _read(self, headers: Headers, receive: Receive) -> bytes | None:
        """The whole body: nothing starts before it is there. None if the client has left."""
        most = self._options.max_body_bytes
        announced = headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > most:
            raise _too_large(int(announced), most)
        body = bytearray()
        try:
            async with asyncio.timeout(self._options.body_timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    if len(body) > most:
                        raise _too_large(len(body), most)
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise ApiError(
                408,
                f"the request's body has not arrived within {self._options.body_timeout:g} s: "
                "send it again",
            ) from None


class RateLimit:
    """Counts requests over a moving window. OctavoError for a limit that cannot be read."""

    def __init__(self, limit: str) -> None:
        from limits import parse
        from limits.storage import MemoryStorage
        from limits.strategies import MovingWindowRateLimiter

        try:
            self._limit: RateLimitItem = parse(limit)
        except ValueError:
            raise OctavoError(
                f"the rate limit is {limit!r}: give a number of requests and a time, "
                "such as 60/minute"
            ) from None
        self._limiter = MovingWindowRateLimiter(MemoryStorage())

    def check(self, client: str) -> None:
        if not self._limiter.hit(self._limit, client):
            raise busy(f"the rate limit is {self._limit}: send requests more slowly")


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(f"{PAGE_PATH}/")


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def _address(scope: Scope) -> str:
    client = scope.get("client")
    return client[0] if client else "unknown"


def _too_large(size: int, most: int) -> ApiError:
    return ApiError(
        413,
        f"the request's body has {size} bytes or more, the server reads at most {most}: send a "
        "shorter one, or start the server with a larger --max-body-size",
    )


def _replay(body: bytes, receive: Receive) -> Receive:
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return messages.pop() if messages else await receive()

    return replayed
