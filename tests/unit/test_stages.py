"""Build stages are timed, recorded in order and reported to an observer."""

from __future__ import annotations

import time

import pytest

from octavo.compiler.stages import StageRecord, Stages


class Recorder:
    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []

    def started(self, name: str) -> None:
        self.events.append(("started", name))

    def advanced(self, name: str, done: int, total: int) -> None:
        self.events.append(("advanced", name, done, total))

    def finished(self, record: StageRecord) -> None:
        self.events.append(("finished", record.name, record.size_bytes))


def test_stages_are_recorded_in_order_with_time_and_size() -> None:
    stages = Stages()
    with stages.stage("capture") as stage:
        time.sleep(0.02)
        stage.size = 123
    with stages.stage("lower") as stage:
        stage.advance(1, 2)
    assert [(r.name, r.size_bytes) for r in stages.records] == [("capture", 123), ("lower", None)]
    assert 0.02 <= stages.records[0].seconds < 1


def test_observer_sees_every_event() -> None:
    recorder = Recorder()
    with Stages(recorder).stage("capture") as stage:
        stage.advance(3, 10)
        stage.size = 7
    assert recorder.events == [
        ("started", "capture"),
        ("advanced", "capture", 3, 10),
        ("finished", "capture", 7),
    ]


def test_a_failed_stage_is_not_recorded() -> None:
    recorder = Recorder()
    stages = Stages(recorder)
    with pytest.raises(ZeroDivisionError), stages.stage("capture"):
        raise ZeroDivisionError
    assert stages.records == ()
    assert recorder.events == [("started", "capture")]
