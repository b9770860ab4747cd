"""The open requests of an AsyncLLM: commands to its engine, and the engine's events to them."""

from __future__ import annotations

import asyncio
import copy
import itertools
import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo.graphs.errors import EngineClosedError, EngineDeadError, QueueFullError, RequestError
from octavo.runtime.metrics import definitions as metric_definitions
from octavo.runtime.metrics.snapshots import Snapshot, SupervisedMetrics
from octavo.runtime.outputs import RequestOutput
from octavo.runtime.prompts import EncodedPrompt, PromptReader
from octavo.runtime.sampling.beam_search import BeamSearchParams
from octavo.runtime.sampling.sampling_params import SamplingParams
from octavo.runtime.serving.messages import (
    AbortRequest,
    AddRequest,
    Command,
    Outcome,
    PinPrefix,
    Progress,
    ReadMetrics,
    ReleasePin,
    Reply,
    ResetPrefixCache,
)
from octavo.runtime.serving.output_stream import OutputStream, engine_output_kind

_logger = logging.getLogger(__name__)

Question = type[ResetPrefixCache] | type[ReadMetrics]


class RequestBroker:
    """Thread-safe. `post` hands a command to the engine's side and never blocks.

    started  what reads prompts for the engine, or why there is none
    bundle   the folder of the engine that has started
    closed   done when the engine's side has ended and left nothing behind
    """

    def __init__(self, post: Callable[[Command], None], *, max_open_requests: int) -> None:
        self.started: Future[PromptReader] = _uncancellable()
        self.closed: Future[None] = _uncancellable()
        self.bundle: Path | None = None
        self._post = post
        self._max_open_requests = max_open_requests
        # Reentrant: the garbage collector may run a finaliser, which closes, anywhere.
        self._lock = threading.RLock()
        self._keys = itertools.count()
        self._streams: dict[int, OutputStream] = {}  # of requests that the engine has not ended
        self._keys_by_id: dict[str, int] = {}
        self._replies: dict[int, Future[Snapshot | None]] = {}
        self._pending_pins: dict[int, PinPrefix] = {}
        self._pins: dict[int, PinPrefix] = {}
        self._idle: list[Future[None]] = []
        self._metrics = SupervisedMetrics()
        self._num_rejected = 0
        self._num_lost = 0
        self._heard_at = time.monotonic()
        self._draining = False
        self._shut_down = False
        self._trouble: str | None = None  # how the engine died, while no other one runs
        self._dead = False  # and none will

    def open(
        self,
        prompt: EncodedPrompt,
        params: SamplingParams | BeamSearchParams,
        *,
        request_id: str | None,
        priority: int,
        loop: asyncio.AbstractEventLoop,
    ) -> OutputStream:
        """Queues a request. RequestError, QueueFullError, EngineClosedError or EngineDeadError."""
        if request_id is None:
            request_id = uuid.uuid4().hex
        elif not isinstance(request_id, str):
            raise RequestError(f"request_id is {request_id!r}, it must be a text")
        engine_params = params
        if isinstance(params, SamplingParams):
            engine_params = replace(params, output_kind=engine_output_kind(params))
        with self._lock:
            self._check_open()
            if self._draining:
                raise EngineClosedError(
                    "the AsyncLLM is draining and takes no new requests: send it to another one"
                )
            if request_id in self._keys_by_id:
                raise RequestError(
                    f"a request with the id {request_id!r} is still open: give each its own id"
                )
            if len(self._streams) >= self._max_open_requests:
                self._num_rejected += 1
                raise QueueFullError(
                    f"{len(self._streams)} requests are open, max_open_requests is "
                    f"{self._max_open_requests}: try again later"
                )
            key = next(self._keys)
            stream = OutputStream(key, request_id, prompt, params, loop)
            self._note_work()
            self._streams[key] = stream
            self._keys_by_id[request_id] = key
            salt = prompt.cache_salt.decode()
            self._post(AddRequest(key, prompt.token_ids, salt, engine_params, priority))
            return stream

    def leave(self, stream: OutputStream) -> None:
        """The reader is gone: aborts the request unless it has ended."""
        with self._lock:
            if stream.key in self._streams:
                self._forget(stream)
                self._post(AbortRequest(stream.key))

    def abort(self, request_id: str) -> bool:
        """Ends a request with what it has; False if none with this id is open."""
        with self._lock:
            key = self._keys_by_id.get(request_id)
            if key is None:
                return False
            stream = self._streams[key]
            wakes = stream.abort()
            self._forget(stream)
            self._post(AbortRequest(key))
        if wakes:
            self._wake([stream])
        return True

    def ask(self, question: Question) -> Future[Snapshot | None]:
        """The engine's reply, or the error it gave instead of one."""
        with self._lock:
            return self._send(question(next(self._keys)))

    def pin(self, prompt: EncodedPrompt) -> tuple[int, Future[Snapshot | None]]:
        """The key by which to release the pin, and when it is made. It outlives the engine."""
        with self._lock:
            salt = prompt.cache_salt.decode()
            command = PinPrefix(next(self._keys), prompt.token_ids, salt)
            reply = self._send(command)
            self._pending_pins[command.key] = command
            return command.key, reply

    def release_pin(self, key: int) -> None:
        """Harmless when called twice, and after the engine has ended."""
        with self._lock:
            pending = self._pending_pins.pop(key, None)
            pin = self._pins.pop(key, pending)
            if pin is not None and not (self._dead or self._shut_down):
                self._post(ReleasePin(key))

    @property
    def pins(self) -> list[PinPrefix]:
        """What a new engine is to pin before anything else."""
        with self._lock:
            return list(self._pins.values())

    def drain(self) -> Future[None]:
        """Refuses requests from now on; done when all have ended in the engine."""
        with self._lock:
            self._draining = True
            idle: Future[None] = _uncancellable()
            if self._streams:
                self._idle.append(idle)
            else:
                idle.set_result(None)
            return idle

    def shut_down(self) -> None:
        """Ends every open request with an EngineClosedError and refuses whatever comes after."""
        with self._lock:
            if self._shut_down:
                return
            self._shut_down = True
            error = EngineClosedError("the AsyncLLM was shut down before it was started")
            if not self.started.done():
                self.started.set_exception(error)
            self._end_all(
                self._streams,
                self._replies,
                lambda: EngineClosedError(
                    "the AsyncLLM was shut down while the request was running: "
                    "send it to another one"
                ),
            )

    def silence(self) -> float:
        """Seconds for which an engine that has work has said nothing."""
        with self._lock:
            if not (self._streams or self._replies) or self._trouble is not None:
                return 0.0
            return time.monotonic() - self._heard_at

    @property
    def trouble(self) -> str | None:
        """How the engine died, while no other one has taken its place."""
        return self._trouble

    @property
    def dead(self) -> bool:
        """Whether the engine has died and no other one will take its place."""
        return self._dead

    def metrics(self) -> Snapshot:
        """The last known ones; counters of engines that have died are in them."""
        with self._lock:
            snapshot = self._metrics.snapshot()
            snapshot[metric_definitions.ADMISSION_REJECTIONS.name] += self._num_rejected
            ended = dict(snapshot[metric_definitions.REQUEST_SUCCESS.name])
            ended["error"] += self._num_lost
            snapshot[metric_definitions.REQUEST_SUCCESS.name] = ended
            return snapshot

    # What follows is called by the engine's side, on its thread.

    def receive(self, event: Progress | Reply) -> None:
        with self._lock:
            self._heard_at = time.monotonic()
            if isinstance(event, Progress) and event.metrics is not None:
                self._metrics.update(event.metrics)
        match event:
            case Progress(outcomes):
                self._deliver(outcomes)
            case Reply():
                self._settle(event)

    def engine_started(self, bundle: Path, prompts: PromptReader) -> None:
        """An engine takes commands: the first one, or another one in place of a dead one."""
        with self._lock:
            self.bundle = bundle
            self._heard_at = time.monotonic()
            self._trouble = None
            if not self.started.done():
                self.started.set_result(prompts)

    def start_failed(self, error: Exception) -> None:
        with self._lock:
            self._dead = True
            self._trouble = str(error)
            if not self.started.done():
                self.started.set_exception(error)

    def engine_died(
        self, cause: str, *, restarting: bool, unsent: Callable[[], Collection[int]] = tuple
    ) -> None:
        """Ends what the engine had been sent; `unsent` keys wait for the next one, if there is one.

        cause  "the engine process 123 was killed by signal 9"
        """
        with self._lock:
            self._trouble = cause
            self._dead = not restarting
            self._metrics.engine_ended()
            kept = frozenset(unsent()) if restarting else frozenset()
            remedy = "send it again" if restarting else "make another AsyncLLM"
            streams = self._streams.keys() - kept
            self._num_lost += len(streams)
            self._end_all(
                streams,
                self._replies.keys() - kept,
                lambda: EngineDeadError(f"{cause} while the request was running: {remedy}"),
            )
            if self._dead and not self.started.done():
                self.started.set_exception(EngineDeadError(cause))

    def expire(self, keys: Iterable[int], seconds: float) -> None:
        """Ends requests that have waited too long for a new engine."""
        with self._lock:
            keys = list(keys)
            self._end_all(
                keys,
                keys,
                lambda: EngineDeadError(
                    f"{self._trouble}, and no other one was ready within {seconds:g} s: "
                    "send the request again later"
                ),
            )

    def _check_open(self) -> None:
        if self._shut_down:
            raise EngineClosedError("the AsyncLLM is shut down: make another one")
        if self._dead:
            raise EngineDeadError(f"{self._trouble}: make another AsyncLLM")

    def _send(self, command: PinPrefix | ResetPrefixCache | ReadMetrics) -> Future[Snapshot | None]:
        self._check_open()
        reply: Future[Snapshot | None] = _uncancellable()
        self._note_work()
        self._replies[command.key] = reply
        self._post(command)
        return reply

    def _note_work(self) -> None:
        if not (self._streams or self._replies):
            self._heard_at = time.monotonic()  # an engine without work has nothing to say

    def _settle(self, reply: Reply) -> None:
        with self._lock:
            future = self._replies.pop(reply.key, None)
            pin = self._pending_pins.pop(reply.key, None)
            if pin is not None and reply.error is None:
                self._pins[reply.key] = pin
            if future is None:
                if reply.error is not None and self._pins.pop(reply.key, None) is not None:
                    _logger.error("a prefix could not be pinned again: %s", reply.error)
                return
            if reply.value is not None:
                self._metrics.update(reply.value)
            if reply.error is not None:
                future.set_exception(reply.error)
            else:
                future.set_result(reply.value)

    def _deliver(self, outcomes: Iterable[Outcome]) -> None:
        woken = []
        with self._lock:
            for key, result in outcomes:
                stream = self._streams.get(key)
                if stream is None:
                    continue  # its reader has left
                if self._hand_over(stream, result):
                    woken.append(stream)
        self._wake(woken)

    def _hand_over(self, stream: OutputStream, result: RequestOutput | Exception) -> bool:
        if isinstance(result, Exception):
            # An error of a step ends many requests: each raises its own, with its own traceback.
            wakes = stream.fail(copy.copy(result))
            self._forget(stream)
        else:
            wakes = stream.push(result)
            if result.finished:
                self._forget(stream)
        return wakes

    def _end_all(
        self, streams: Iterable[int], replies: Iterable[int], error: Callable[[], Exception]
    ) -> None:
        woken = []
        for key in list(streams):
            stream = self._streams.get(key)
            if stream is not None:
                if stream.fail(error()):
                    woken.append(stream)
                self._forget(stream)
        for key in list(replies):
            self._pending_pins.pop(key, None)
            reply = self._replies.pop(key, None)
            if reply is not None:
                reply.set_exception(error())
        self._wake(woken)

    def _forget(self, stream: OutputStream) -> None:
        del self._streams[stream.key]
        del self._keys_by_id[stream.request_id]
        if not self._streams:
            for idle in self._idle:
                idle.set_result(None)
            self._idle.clear()

    def _wake(self, streams: Iterable[OutputStream]) -> None:
        """One call into an event loop wakes all its readers."""
        by_loop: dict[asyncio.AbstractEventLoop, list[OutputStream]] = {}
        for stream in streams:
            by_loop.setdefault(stream.loop, []).append(stream)
        for loop, readers in by_loop.items():
            try:
                loop.call_soon_threadsafe(_wake_readers, readers)
            except RuntimeError:  # the loop is closed, nobody reads any more
                for reader in readers:
                    self.leave(reader)


def _wake_readers(streams: Iterable[OutputStream]) -> None:
    for stream in streams:
        stream.wake()


def _uncancellable() -> Future[Any]:
    """Several tasks may wait for it; the cancellation of one is not the others'."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future
