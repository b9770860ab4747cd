"""The report: tables of what was measured, and Octavo's ratio to the best peer."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from octavo.tools.bench.peers import scenario as scenarios
from octavo.tools.bench.peers.catalog import (
    ENGINES,
    MODELS,
    OCTAVO,
    PEERS,
    PRECISIONS,
    Engine,
    Model,
    Precision,
)
from octavo.tools.bench.peers.process import PeerError
from octavo.tools.bench.peers.results import Measurement, Quality, Results
from octavo.tools.bench.peers.scenario import Scenario

PLOT = Path(__file__).parent / "plot.py"
INTRODUCTION = """\
# Octavo beside other engines

`make bench-peers` writes this file. It installs every engine in an environment of its own, runs the
same token ids through all of them and compares their predictions of one text with those of
transformers in float32.
"""
METHOD = """\
## How it is measured

- Every engine is loaded once, in a process of its own. All processes but the one that measures are
  stopped (SIGSTOP), because idle engines keep threads spinning.
- The engines take turns: each runs a scenario once unmeasured, then once in every round. A run
  follows a short request that wakes the engine up. Numbers are medians, with the least and the
  greatest in brackets.
- All requests of a scenario are sent at once, with random token ids that no run repeats, so that no
  prefix cache helps. Decoding is greedy and ignores the end of the text; the number of generated
  tokens is checked. Tokens a second count generated tokens only, the time includes the prefill.
- The time to the first token is that of a request for one token.
- Perplexity and agreement are those of the opening of a novel of 1865, each token predicted from
  all before it; agreement is the share of positions where the most probable token is that of
  transformers in float32.
- The matrices of SmolLM2 come as 4 bit values (Q4_1), which every engine but two gets as float32.
  Octavo and llama.cpp (q4_1) read them as they are; the others quantise them a second time.
- A ratio is Octavo's median divided by that of the best peer at the same precision.
"""
NOT_MEASURED = "-"


@dataclass(frozen=True)
class Comparison:
    """Octavo against the best peer at one precision; ratio is Octavo's value by the peer's."""

    scenario: Scenario
    precision: Precision
    octavo: Measurement
    peer: Measurement

    @property
    def ratio(self) -> float:
        return self.octavo.median / self.peer.median

    @property
    def target(self) -> float | None:
        return self.scenario.targets.get(self.octavo.model, {}).get(self.precision)

    @property
    def meets_target(self) -> bool | None:
        if self.target is None:
            return None
        if scenarios.more_is_better(self.scenario):
            return self.ratio >= self.target
        return self.ratio <= self.target

    @property
    def same_run(self) -> bool:
        """Whether the two took turns, so that the machine was the same for both."""
        return self.octavo.run == self.peer.run


def compare(
    results: Results, model: str, scenario: Scenario, precision: Precision
) -> Comparison | None:
    """None where Octavo or every peer of that precision is missing."""
    ours: list[Measurement] = []
    theirs: list[Measurement] = []
    for engine in ENGINES:
        measured = results.measurement(model, engine.name, scenario.name)
        if measured is not None and engine.precision == precision:
            (ours if engine.peer == OCTAVO else theirs).append(measured)
    if not ours or not theirs:
        return None
    choose = max if scenarios.more_is_better(scenario) else min
    best = choose(theirs, key=lambda one: one.median)
    return Comparison(scenario, precision, ours[0], best)


def markdown(results: Results, known: Sequence[Scenario], plotted: bool) -> str:
    parts = [INTRODUCTION, _machine(results)]
    if plotted:
        parts.append("![medians of every engine](benchmarks.svg)\n")
    for model in MODELS.values():
        parts += _model(results, model, known)
    parts += [METHOD, _engines(results), _versions(results)]
    return "\n".join(part for part in parts if part)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; columns whose name ends with `>` are aligned to the right."""
    names = [name.rstrip(">") for name in header]
    rule = ["---:" if name.endswith(">") else "---" for name in header]
    lines = [names, rule, *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _machine(results: Results) -> str:
    if not results.measurements:
        return "Nothing has been measured yet.\n"
    runs = sorted({one.run for one in results.measurements})
    threads = ", ".join(sorted({str(one.threads) for one in results.measurements}))
    when = runs[0] if len(runs) == 1 else f"{runs[0]} to {runs[-1]}"
    what = "; ".join(f"{name} {value}" for name, value in results.machine.items())
    return f"Machine: {what}. Threads of every engine: {threads}. Measured: {when} UTC.\n"


def _model(results: Results, model: Model, known: Sequence[Scenario]) -> list[str]:
    engines = [engine for engine in ENGINES if model.name in engine.models]
    header = ["engine", "precision", *(f"{_heading(one)}>" for one in known)]
    if model.has_text:
        header += ["perplexity>", "agreement>"]
    rows = [_row(results, model, engine, known) for engine in engines]
    reference = results.quality(model.name, "reference")
    if model.has_text and reference is not None:
        blank = [NOT_MEASURED] * len(known)
        rows.append(["transformers", "fp32", *blank, f"{reference.perplexity:.3f}", "100 %"])
    return [
        f"## {model.title}\n",
        table(header, rows),
        _missing(results, model, engines),
        *_ratios(results, model, known),
    ]


def _heading(scenario: Scenario) -> str:
    return f"{scenario.description}, {scenarios.unit(scenario)}"


def _row(results: Results, model: Model, engine: Engine, known: Sequence[Scenario]) -> list[str]:
    title = PEERS[engine.peer].title
    name = f"**{title}**" if engine.peer == OCTAVO else title
    variant = engine.name.partition("-")[2]
    precision = (
        engine.precision if variant == engine.precision else f"{engine.precision} ({variant})"
    )
    cells = [name, precision.replace("_", "\\_")]
    cells += [_cell(results.measurement(model.name, engine.name, one.name)) for one in known]
    if model.has_text:
        cells += _quality_cells(results.quality(model.name, engine.name))
    return cells


def _quality_cells(quality: Quality | None) -> list[str]:
    if quality is None:
        return [NOT_MEASURED, NOT_MEASURED]
    return [f"{quality.perplexity:.3f}", f"{quality.agreement * 100:.1f} %"]


def _cell(measured: Measurement | None) -> str:
    if measured is None:
        return NOT_MEASURED
    low, high = min(measured.values), max(measured.values)
    return f"{_number(measured.median)} ({_number(low)}-{_number(high)})"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _missing(results: Results, model: Model, engines: Sequence[Engine]) -> str:
    lines = [
        f"- {engine.name}: {results.unavailable[f'{model.name}/{engine.name}']}\n"
        for engine in engines
        if f"{model.name}/{engine.name}" in results.unavailable
    ]
    return "Not measured:\n\n" + "".join(lines) if lines else ""


def _ratios(results: Results, model: Model, known: Sequence[Scenario]) -> list[str]:
    found = [
        compared
        for precision in PRECISIONS
        for scenario in known
        if (compared := compare(results, model.name, scenario, precision)) is not None
    ]
    if not found:
        return []
    header = ["precision", "scenario", "Octavo>", "best peer", "its value>", "ratio>", "target>"]
    rows = [
        [
            one.precision,
            _heading(one.scenario),
            _number(one.octavo.median),
            one.peer.engine.replace("_", "\\_"),
            _number(one.peer.median),
            f"{one.ratio:.2f}" + ("" if one.same_run else " \\*"),
            _target(one),
            {None: "", True: "yes", False: "no"}[one.meets_target],
        ]
        for one in found
    ]
    parts = ["### Octavo by the best peer at the same precision\n", table([*header, "met"], rows)]
    if not all(one.same_run for one in found):
        parts.append("\\* measured in different runs: the machine may have changed between them.\n")
    return parts


def _target(compared: Comparison) -> str:
    if compared.target is None:
        return ""
    sign = ">=" if scenarios.more_is_better(compared.scenario) else "<="
    return f"{sign} {compared.target:g}"


def _engines(results: Results) -> str:
    rows = [(engine.name.replace("_", "\\_"), engine.note) for engine in ENGINES]
    return "## Settings\n\n" + table(["engine", "settings"], rows)


def _versions(results: Results) -> str:
    rows = [
        (PEERS[name].title, ", ".join(f"{package} {number}" for package, number in found.items()))
        for name, found in results.versions.items()
    ]
    if not rows:
        return ""
    return "## Versions\n\n" + table(["engine", "packages"], sorted(rows))


def plot(results: Results, known: Sequence[Scenario], python: Path, output: Path) -> None:
    """Draws the medians with the interpreter of an environment that has matplotlib."""
    bars = [
        {
            "panel": _heading(scenario),
            "engine": engine.name,
            "precision": engine.precision,
            "ours": engine.peer == OCTAVO,
            "median": measured.median,
            "low": min(measured.values),
            "high": max(measured.values),
        }
        for scenario in known
        for engine in sorted(ENGINES, key=lambda one: PRECISIONS.index(one.precision))
        if (measured := results.measurement(next(iter(MODELS)), engine.name, scenario.name))
    ]
    if not bars:
        raise PeerError("nothing has been measured")
    output.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"title": next(iter(MODELS.values())).title, "bars": bars})
    command = [str(python), "-P", str(PLOT), str(output)]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PeerError(f"matplotlib failed: {done.stderr.strip().splitlines()[-1]}")
