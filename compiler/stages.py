"""Times the stages of a build and tells an observer, such as a progress bar, how far it is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class StageRecord:
    name: str
    seconds: float
    size_bytes: int | None  # of what the stage made, where that is known


class StageObserver(Protocol):
    """Called from the building thread. A stage that fails is started and never finished."""

    def started(self, name: str) -> None: ...

    def advanced(self, name: str, done: int, total: int) -> None: ...

    def finished(self, record: StageRecord) -> None: ...


class Stage:
    """A running stage; set `size` to the bytes it made."""

    def __init__(self, name: str, observer: StageObserver | None) -> None:
        self.name = name
        self.size: int | None = None
        self._observer = observer

    def advance(self, done: int, total: int) -> None:
        """Reports that `done` of `total` units of the stage's work are finished."""
        if self._observer is not None:
            self._observer.advanced(self.name, done, total)


class Stages:
    def __init__(self, observer: StageObserver | None = None) -> None:
        self._observer = observer
        self._records: list[StageRecord] = []

    @property
    def records(self) -> tuple[StageRecord, ...]:
        """The finished stages, in order."""
        return tuple(self._records)

    @contextmanager
    def stage(self, name: str) -> Iterator[Stage]:
        stage = Stage(name, self._observer)
        if self._observer is not None:
            self._observer.started(name)
        begin = time.perf_counter()
        yield stage
        record = StageRecord(name, time.perf_counter() - begin, stage.size)
        self._records.append(record)
        if self._observer is not None:
            self._observer.finished(record)
