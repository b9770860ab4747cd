"""Runs an engine in a process, hands its outputs to their clients, and replaces it when it dies."""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from . import frames
from .engine_process import EngineGoneError, EngineProcess
from .responder import Responder
from .settings import Settings

_logger = logging.getLogger(__name__)

_MAX_DELAY = 30.0  # seconds between two starts, at most
_END_TIMEOUT = 10.0  # seconds for a step to end and an engine to close


class EngineFailedError(Exception):
    """The engine could not be loaded."""


class RefusedError(Exception):
    """A request was not taken; `code` is a name of `pb_utils.TritonError`."""

    def __init__(self, message: str, code: str = "UNAVAILABLE") -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Status:
    """`complaint`: why the model is not healthy; `generation` counts the engines started.

    given_up  no engine will be started again
    """

    complaint: str | None
    given_up: bool
    generation: int
    snapshot: dict[str, Any] | None  # the newest metrics of the engine that runs


class Supervisor:
    """Thread-safe. Open requests never exceed `max_open_requests`, and nothing else is queued.

    server  number of the process that started this one, and without which both it and its engine
            are to end; None for any
    """

    def __init__(self, settings: Settings, server: int | None = None) -> None:
        self._settings = settings
        self._server = server
        self._lock = threading.Lock()
        self._send_lock = threading.Lock()
        self._keys = itertools.count()
        self._open: dict[int, Responder] = {}
        self._process: EngineProcess | None = None  # the newest one, be it dead
        self._trouble: str | None = "the engine is not started"  # why no engine takes requests
        self._complaint: str | None = None  # of the engine that runs, about itself
        self._snapshot: dict[str, Any] | None = None
        self._generation = 0
        self._given_up = False
        self._deaths: collections.deque[float] = collections.deque()
        self._started: Future[list[dict[str, Any]]] = Future()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)

    def start(self) -> list[dict[str, Any]]:
        """Waits until the engine is loaded; the definitions of its metrics. EngineFailedError."""
        self._thread.start()
        return self._started.result()

    def submit(self, request: dict[str, Any], responder: Responder) -> None:
        """Sends a request to the engine; RefusedError if that is not possible now."""
        limit = self._settings.max_open_requests
        with self._lock:
            if self._closing.is_set():
                raise RefusedError(
                    "the model is being unloaded: send the request to another server"
                )
            if self._trouble is not None:
                raise RefusedError(f"{self._trouble}: send the request again later")
            if len(self._open) >= limit:
                raise RefusedError(
                    f"{len(self._open)} requests are open, max_open_requests is {limit}: "
                    "try again later"
                )
            assert self._process is not None
            process, key = self._process, next(self._keys)
            self._open[key] = responder
        frame = frames.encode({"add": key, "request": request})
        if len(frame) > frames.MOST_BYTES:
            self._take(key)
            raise RefusedError(
                f"the request has {len(frame):,} bytes, at most {frames.MOST_BYTES:,} are taken: "
                "shorten the prompt",
                "INVALID_ARG",
            )
        self._send(process, frame)

    def cancel_abandoned(self) -> None:
        """Ends the requests whose client is gone and frees what they hold in the engine."""
        with self._lock:
            process, responders = self._process, list(self._open.items())
        for key, responder in responders:
            if responder.is_cancelled() and self._take(key) is not None:
                responder.fail("the client cancelled the request", "CANCELLED")
                if process is not None:
                    self._send(process, frames.encode({"cancel": key}))

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def status(self) -> Status:
        with self._lock:
            return Status(
                complaint=self._trouble or self._complaint,
                given_up=self._given_up,
                generation=self._generation,
                snapshot=self._snapshot,
            )

    def stop(self) -> None:
        """Refuses requests, waits for the open ones for `drain_timeout`, then ends the engine."""
        end = time.monotonic() + self._settings.drain_timeout
        self._closing.set()
        while self.num_open and self._trouble is None and time.monotonic() < end:
            time.sleep(0.01)
        with self._lock:
            process = self._process
        if process is not None:
            process.close()
        if self._thread.ident is not None:
            self._thread.join(_END_TIMEOUT)
            if self._thread.is_alive() and process is not None:
                process.kill()
                self._thread.join(_END_TIMEOUT)

    def _run(self) -> None:
        try:
            self._supervise()
        except BaseException as error:
            # Whatever it is: nobody must wait for an engine that nobody watches.
            _logger.exception("the engine's supervisor has failed")
            cause = f"the engine's supervisor died of {type(error).__name__}: {error}"
            if not self._started.done():
                self._started.set_exception(EngineFailedError(cause))
            self._engine_ended(cause)
            self._given_up = True
            with self._lock:
                process = self._process
            if process is not None:
                process.kill()

    def _supervise(self) -> None:
        while not self._closing.is_set():
            cause = self._run_engine()
            if not self._started.done():
                self._started.set_exception(EngineFailedError(cause))
                return
            if self._closing.is_set():
                self._engine_ended("the model was unloaded")
                return
            delay = self._next_delay()
            if delay is None:
                cause += f", the last of {len(self._deaths)} deaths: the model must be loaded again"
            _logger.error("%s", cause)
            self._engine_ended(cause)
            if delay is None:
                self._given_up = True
                return
            self._closing.wait(delay)

    def _run_engine(self) -> str:
        """How it ended, or what it died of."""
        settings = self._settings
        try:
            process = EngineProcess(settings)
        except OSError as error:
            return f"the engine process could not be started ({error})"
        with self._lock:
            self._process = process
        if self._closing.is_set():
            process.close()
        start = {
            "engine": settings.engine,
            "options": settings.engine_options,
            "max_open_requests": settings.max_open_requests,
            "heartbeat_timeout": settings.heartbeat_timeout,
            "server": self._server,
        }
        self._send(process, frames.encode({"protocol": frames.PROTOCOL, "start": start}))
        cause = None
        while (message := process.read()) is not None:
            cause = self._obey(process, message) or cause
        end = process.reap(_END_TIMEOUT if self._closing.is_set() else 1.0)
        return cause or end

    def _obey(self, process: EngineProcess, message: dict[str, Any]) -> str | None:
        """The cause of death, if that is what the engine says."""
        if "outputs" in message:
            for key, outputs, error, final in message["outputs"]:
                self._deliver(key, outputs, error, final)
            self._send(process, frames.encode({"delivered": True}))
        elif "metrics" in message:
            with self._lock:
                self._snapshot, self._complaint = message["metrics"], message["trouble"]
        elif "ready" in message:
            with self._lock:
                self._trouble = self._complaint = self._snapshot = None
                self._generation += 1
            if not self._started.done():
                self._started.set_result(message["ready"])
        return message.get("failed") or message.get("dying")

    def _deliver(
        self, key: int, outputs: dict[str, list[Any]], error: list[str] | None, final: bool
    ) -> None:
        responder = self._take(key) if final else self._open.get(key)
        if responder is None:
            return  # cancelled meanwhile
        try:
            if error is None:
                responder.send(outputs, final=final)
            else:
                responder.fail(*error)
        except Exception:
            # The server refuses a response: that is between it and this client alone.
            _logger.exception("a response could not be sent")

    def _engine_ended(self, cause: str) -> None:
        """Ends the requests that it had."""
        with self._lock:
            self._trouble = cause
            self._complaint = self._snapshot = None
            lost, self._open = self._open, {}
        for responder in lost.values():
            with contextlib.suppress(Exception):
                responder.fail(
                    f"{cause} while the request was running: send it again", "UNAVAILABLE"
                )

    def _next_delay(self) -> float | None:
        """Seconds to wait before the next start; None if there have been too many deaths."""
        now = time.monotonic()
        self._deaths.append(now)
        while self._deaths[0] < now - self._settings.restart_window:
            self._deaths.popleft()
        count = len(self._deaths)
        if count > self._settings.max_restarts:
            return None
        if count == 1:
            return 0.0
        return min(_MAX_DELAY, self._settings.restart_delay * 2.0 ** (count - 2))

    def _take(self, key: int) -> Responder | None:
        with self._lock:
            return self._open.pop(key, None)

    def _send(self, process: EngineProcess, frame: bytes) -> None:
        """Its death is noticed where it is read, which ends every open request."""
        with self._send_lock, contextlib.suppress(EngineGoneError):
            process.send(frame)
