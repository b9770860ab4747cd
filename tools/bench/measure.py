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
    METRICS,
    AnotherBackend,
    BuildTime,
    FirstToken,
    HostTime,
    ImportTime,
    Latency,
    PeakMemory,
    Scenario,
    Serving,
    Speculative,
)


@dataclass(frozen=True)
class Result:
    """One metric of a scenario; the scenario's target is its first metric's."""

    name: str
    metric: str
    unit: str
    values: tuple[float, ...]
    median: float
    at_most: float | None = None
    at_least: float | None = None

    @property
    def meets_target(self) -> bool | None:
        """None if there is no target."""
        if self.at_most is not None:
            return self.median <= self.at_most
        if self.at_least is not None:
            return self.median >= self.at_least
        return None


def measure(scenario: Scenario, engine: Path, model: str | None = None) -> list[Result]:
    """The scenario's metrics, in order. Raises OctavoError if a process of it fails.

    `model` is what a build scenario builds.
    """
    series = _series(scenario, engine, model)
    results = []
    units = METRICS[scenario.kind]
    for index, metric in enumerate([*units, *(m for m in series if m not in units)]):
        result = Result(
            name=scenario.name,
            metric=metric,
            unit=units.get(metric, "%"),
            values=tuple(series[metric]),
            median=statistics.median(series[metric]),
            at_most=None if index else scenario.at_most,
            at_least=None if index else scenario.at_least,
        )
        results.append(result)
    return results


def _series(scenario: Scenario, engine: Path, model: str | None) -> dict[str, list[float]]:
    if isinstance(scenario, ImportTime):
        _import_seconds(scenario.module)  # warm-up: byte code and the file cache
        return {"import": [_import_seconds(scenario.module) for _ in range(scenario.runs)]}
    if isinstance(scenario, BuildTime):
        built = _model(scenario, model)
        return {"build": [_build_seconds(built) for _ in range(scenario.runs)]}
    if isinstance(scenario, AnotherBackend):
        return _another_backend(scenario, engine, _model(scenario, model))
    if isinstance(scenario, FirstToken):
        _first_token_seconds(scenario, engine)  # warm-up
        seconds = [_first_token_seconds(scenario, engine) for _ in range(scenario.runs)]
        return {"first token": seconds}
    if isinstance(scenario, PeakMemory):
        return _joined([_serve(scenario, engine) for _ in range(scenario.runs)])
    if isinstance(scenario, Speculative):
        return _speculative(scenario, engine)
    if isinstance(scenario, HostTime):
        return _joined([_host_time(scenario, engine) for _ in range(scenario.runs)])
    return _serve(scenario, engine)


def _model(scenario: Scenario, model: str | None) -> str:
    if model is None:
        raise OctavoError(f"the scenario {scenario.name!r} builds an engine: give --model")
    return model


def _joined(runs: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    return {name: [value for run in runs for value in run[name]] for name in runs[0]}


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


def _another_backend(scenario: AnotherBackend, engine: Path, model: str) -> dict[str, list[float]]:
    latency = Latency(
        kind="latency",
        runs=1,
        **scenario.model_dump(
            include={"name", "description", "num_seqs", "prompt_tokens", "output_tokens"}
        ),
    )
    series: dict[str, list[float]] = {"ratio": [], "other": [], "this": []}
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder, "engine")
        started = time.perf_counter()
        quantization = read_manifest(engine).quantization
        build(model, other, quantization=quantization, backend=scenario.backend, use_cache=False)
        series["build"] = [time.perf_counter() - started]
        for _ in range(scenario.runs):
            for name, path in (("this", engine), ("other", other)):
                between = _serve(latency, path)["between tokens"]
                series[name].append(statistics.median(between))
            series["ratio"].append(series["other"][-1] / series["this"][-1])
    return series


def build(
    model: str,
    engine: Path,
    *,
    quantization: str = "none",
    backend: str = "onnxruntime",
    use_cache: bool = True,
) -> None:
    command = [sys.executable, "-m", "octavo.tools.build_engine"]
    command += ["--model", model, "--output", str(engine), "--backend", backend, "--json"]
    if quantization != "none":
        command += ["--quantization", quantization]
    _output(command if use_cache else [*command, "--no-cache"])


def _first_token_seconds(scenario: FirstToken, engine: Path) -> float:
    started = time.monotonic()
    return _serve(scenario, engine)["first token"][0] - started


def _serve(scenario: Serving, engine: Path) -> dict[str, list[float]]:
    vocab_size = read_manifest(engine).spec.sampled_vocab_size
    command = [sys.executable, "-m", "octavo.tools.bench.serving"]
    command += [str(engine), str(vocab_size), scenario.model_dump_json(exclude_none=True)]
    values: dict[str, list[float]] = json.loads(_output(command))
    return values


def _host_time(scenario: HostTime, engine: Path) -> dict[str, list[float]]:
    command = [sys.executable, "-m", "octavo.tools.bench.host_time"]
    command += [str(engine), scenario.model_dump_json(exclude_none=True)]
    values: dict[str, list[float]] = json.loads(_output(command))
    return values


def _speculative(scenario: Speculative, engine: Path) -> dict[str, list[float]]:
    command = [sys.executable, "-m", "octavo.tools.bench.speculative"]
    command += [str(engine), scenario.model_dump_json()]
    values: dict[str, list[float]] = json.loads(_output(command))
    return values


def _output(command: list[str]) -> str:
    """Standard output of a process that must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        name = " ".join(command[1:3])
        raise OctavoError(f"`{name}` failed with exit code {done.returncode}: {lines[-1]}")
    return done.stdout
