"""Measures scenarios, each in fresh processes."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from octavo.backends.bundle import read_manifest
from octavo.graphs.errors import OctavoError
from octavo.tools.bench.scenario import (
    UNITS,
    BuildTime,
    FirstToken,
    ImportTime,
    PeakMemory,
    Scenario,
    Serving,
)


@dataclass(frozen=True)
class Result:
    name: str
    description: str
    unit: str
    values: tuple[float, ...]
    median: float
    at_most: float | None
    at_least: float | None

    @property
    def meets_target(self) -> bool | None:
        """None if the scenario sets no target."""
        if self.at_most is not None:
            return self.median <= self.at_most
        if self.at_least is not None:
            return self.median >= self.at_least
        return None


def measure(scenario: Scenario, model: str, engine: Path) -> Result:
    """Raises OctavoError if a process of the scenario fails."""
    values = _values(scenario, model, engine)
    return Result(
        name=scenario.name,
        description=scenario.description,
        unit=UNITS[scenario.kind],
        values=tuple(values),
        median=statistics.median(values),
        at_most=scenario.at_most,
        at_least=scenario.at_least,
    )


def _values(scenario: Scenario, model: str, engine: Path) -> list[float]:
    if isinstance(scenario, ImportTime):
        _import_seconds(scenario.module)  # warm-up: byte code and the file cache
        return [_import_seconds(scenario.module) for _ in range(scenario.runs)]
    if isinstance(scenario, BuildTime):
        return [_build_seconds(model) for _ in range(scenario.runs)]
    if isinstance(scenario, FirstToken):
        _first_token_seconds(scenario, engine)  # warm-up
        return [_first_token_seconds(scenario, engine) for _ in range(scenario.runs)]
    if isinstance(scenario, PeakMemory):
        return [_serve(scenario, engine)[0] for _ in range(scenario.runs)]
    return _serve(scenario, engine)


def _import_seconds(module: str) -> float:
    code = (
        "import time; started = time.perf_counter()\n"
        f"import {module}\n"
        "print(time.perf_counter() - started)"
    )
    return float(_output([sys.executable, "-c", code]))


def _build_seconds(model: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        build(model, Path(folder, "engine"), use_cache=False)
        return time.perf_counter() - started


def build(model: str, engine: Path, *, use_cache: bool = True) -> None:
    command = [sys.executable, "-m", "octavo.tools.build_engine"]
    command += ["--model", model, "--output", str(engine), "--json"]
    _output(command if use_cache else [*command, "--no-cache"])


def _first_token_seconds(scenario: FirstToken, engine: Path) -> float:
    started = time.monotonic()
    return _serve(scenario, engine)[0] - started


def _serve(scenario: Serving, engine: Path) -> list[float]:
    vocab_size = read_manifest(engine).spec.sampled_vocab_size
    command = [sys.executable, "-m", "octavo.tools.bench.serving"]
    command += [str(engine), str(vocab_size), scenario.model_dump_json(exclude_none=True)]
    values: list[float] = json.loads(_output(command))
    return values


def _output(command: list[str]) -> str:
    """Standard output of a process that must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        name = " ".join(command[1:3])
        raise OctavoError(f"`{name}` failed with exit code {done.returncode}: {lines[-1]}")
    return done.stdout
