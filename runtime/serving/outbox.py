"""Commands that an engine has not taken yet."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable

from octavo.runtime.serving.messages import (
    AbortRequest,
    AddRequest,
    Command,
    PinPrefix,
    ReadMetrics,
    ResetPrefixCache,
)

_EXPECTING = (AddRequest, PinPrefix, ResetPrefixCache, ReadMetrics)


class Outbox:
    """Thread-safe. Never holds more than the open requests and questions, and what ends them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._commands: deque[tuple[Command, float]] = deque()  # with the time it came

    def __bool__(self) -> bool:
        return bool(self._commands)

    def put(self, command: Command) -> None:
        with self._lock:
            if isinstance(command, AbortRequest):
                for index, (waiting, _) in enumerate(self._commands):
                    if isinstance(waiting, AddRequest) and waiting.key == command.key:
                        del self._commands[index]
                        return
            self._commands.append((command, time.monotonic()))

    def put_first(self, commands: Iterable[Command]) -> None:
        now = time.monotonic()
        with self._lock:
            self._commands.extendleft((command, now) for command in reversed(list(commands)))

    def take(self) -> Command | None:
        with self._lock:
            return self._commands.popleft()[0] if self._commands else None

    def keys(self) -> list[int]:
        """Of requests and questions that wait."""
        with self._lock:
            return [command.key for command, _ in self._commands if isinstance(command, _EXPECTING)]

    def engine_died(self) -> None:
        """Drops what only concerns requests and pins that were sent to it."""
        with self._lock:
            kept = [one for one in self._commands if isinstance(one[0], _EXPECTING)]
            self._commands = deque(kept)

    def take_older_than(self, seconds: float) -> list[int]:
        """Removes requests and questions that have waited too long; their keys."""
        end = time.monotonic() - seconds
        taken: list[int] = []
        with self._lock:
            while self._commands and self._commands[0][1] < end:
                command, _ = self._commands.popleft()
                if isinstance(command, _EXPECTING):
                    taken.append(command.key)
        return taken
