"""Steps an engine for as long as it has work and obeys commands between the steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from octavo.graphs.errors import CapacityError, OctavoError, RequestError
from octavo.runtime.invariants import InvariantError
from octavo.runtime.serving.messages import (
    AbortRequest,
    AddRequest,
    Command,
    Event,
    Outcome,
    PinPrefix,
    Progress,
    ReadMetrics,
    ReleasePin,
    Reply,
    ResetPrefixCache,
    Shutdown,
)

if TYPE_CHECKING:
    from octavo.runtime.cache.prefix_cache import PinnedPrefix
    from octavo.runtime.llm_engine import LLMEngine
    from octavo.runtime.metrics.snapshots import Snapshot

# Seconds between two reports of a working engine that has nothing to tell, and between metrics.
REPORT_INTERVAL = 1.0
# Seconds after which an engine without work reports its metrics, and falls asleep.
IDLE_DELAY = 0.05
# Steps that fail in a row, each with other requests, before the engine counts as dead.
MAX_FAILED_STEPS = 3


class Channel(Protocol):
    """The engine's end of the way to its AsyncLLM."""

    def receive(self, timeout: float | None) -> list[Command]:
        """All commands that are there; waits up to `timeout` s, or for ever, for the first one."""

    def send(self, event: Event) -> None:
        """May wait until the other side has read what was sent before."""


class EngineLoop:
    """Nothing that a request brings with it ends the loop; `run` raises what is wrong for good."""

    def __init__(self, engine: LLMEngine, channel: Channel) -> None:
        self._engine = engine
        self._channel = channel
        self._open: dict[int, None] = {}  # keys, in the order of arrival
        self._pins: dict[int, PinnedPrefix] = {}
        self._outcomes: list[Outcome] = []
        self._num_failed_steps = 0
        self._active = False  # whether anything happened since the last metrics
        self._reported_at = time.monotonic()

    def run(self) -> None:
        """Returns after a Shutdown.

        Raises InvariantError, MemoryError or any error that is none of Octavo's if a step does:
        the engine's state is not to be trusted; and the error of the last of several failed steps.
        """
        while True:
            commands = self._channel.receive(self._patience())
            idle = not (commands or self._engine.has_unfinished_requests)
            for command in commands:
                if isinstance(command, Shutdown):
                    return
                self._active = True
                self._obey(command)
            if self._engine.has_unfinished_requests:
                self._active = True
                self._step()
            self._report(idle)

    def _patience(self) -> float | None:
        if self._engine.has_unfinished_requests:
            return 0.0
        return IDLE_DELAY if self._active else None

    def _obey(self, command: Command) -> None:
        match command:
            case AddRequest(key):
                try:
                    self._add(command)
                except InvariantError:
                    raise
                except Exception as error:
                    self._outcomes.append((key, refusal(error)))
                else:
                    self._open[key] = None
            case AbortRequest(key):
                if key in self._open:
                    self._abort(key)
            case PinPrefix(key):
                self._answer(key, lambda: self._pin(command))
            case ReleasePin(key):
                if (pin := self._pins.pop(key, None)) is not None:
                    pin.release()
            case ResetPrefixCache(key):
                self._answer(key, self._engine.reset_prefix_cache)
            case ReadMetrics(key):
                self._answer(key, self._engine.metrics)

    def _add(self, command: AddRequest) -> None:
        self._engine.add_request(
            str(command.key),
            {"prompt_token_ids": command.token_ids, "cache_salt": command.cache_salt},
            command.params,
            priority=command.priority,
        )

    def _pin(self, command: PinPrefix) -> None:
        self._pins[command.key] = self._engine.pin_prefix(
            {"prompt_token_ids": command.token_ids, "cache_salt": command.cache_salt}
        )

    def _answer(self, key: int, action: Callable[[], Snapshot | None]) -> None:
        try:
            reply = Reply(key, action())
        except InvariantError:
            raise
        except Exception as error:
            reply = Reply(key, error=refusal(error))
        self._channel.send(reply)

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except InvariantError:
            raise
        except OctavoError as error:
            self._num_failed_steps += 1
            if self._num_failed_steps >= MAX_FAILED_STEPS:
                raise
            for key in list(self._open):
                self._abort(key)
                self._outcomes.append((key, error))
            return
        self._num_failed_steps = 0
        for output in outputs:
            key = int(output.request_id)
            self._outcomes.append((key, output))
            if output.finished:
                # A pin's steps may have brought it before an abort that came too late.
                self._open.pop(key, None)

    def _abort(self, key: int) -> None:
        del self._open[key]
        self._engine.abort_request(str(key))

    def _report(self, idle: bool) -> None:
        """What has happened, at once; and once a second that the engine is alive, with metrics."""
        metrics: Snapshot | None = None
        now = time.monotonic()
        if self._active and (idle or now - self._reported_at >= REPORT_INTERVAL):
            metrics = self._engine.metrics()
            self._reported_at = now
            self._active = False
        if self._outcomes or metrics is not None:
            self._channel.send(Progress(self._outcomes, metrics))
            self._outcomes = []


def refusal(error: Exception) -> OctavoError:
    """The error as its request's user sees it, whichever way it takes to them."""
    if isinstance(error, OctavoError):
        return error
    if isinstance(error, MemoryError):
        return CapacityError("the request does not fit into memory: shorten it or lower n")
    return RequestError(f"the request cannot be prepared ({type(error).__name__}: {error})")
