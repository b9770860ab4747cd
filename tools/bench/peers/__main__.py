"""`python -m octavo.tools.bench.peers`: installs, measures, writes docs/benchmarks.md."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from octavo.backends import host
from octavo.graphs.errors import OctavoError
from octavo.tools import console
from octavo.tools.bench.peers import checkpoints, environments, quality, report
from octavo.tools.bench.peers import scenario as scenarios
from octavo.tools.bench.peers.catalog import ENGINES, MODELS, PEERS, Engine, Model
from octavo.tools.bench.peers.measure import Field, Workspace, prepare
from octavo.tools.bench.peers.process import PeerError
from octavo.tools.bench.peers.results import Results

T = TypeVar("T")
CPU_FEATURES = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile")

app = console.application("Measures Octavo beside its peers and writes docs/benchmarks.md.")


@app.command()
@console.reports_errors
def compare(
    only: Annotated[
        list[str] | None, typer.Option(help="Name of an engine; repeat it for more.")
    ] = None,
    scenario: Annotated[
        list[str] | None, typer.Option(help="Name of a scenario; repeat it for more.")
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="Name of a model; repeat it for more.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Rounds of alternation.  [default: the scenario's]")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of every engine.")] = 2,
    speed: Annotated[bool, typer.Option(help="Run the scenarios.")] = True,
    score: Annotated[bool, typer.Option(help="Measure perplexity and agreement.")] = True,
    reuse: Annotated[
        bool, typer.Option("--reuse", help="Keep Octavo's engines instead of building them again.")
    ] = False,
    render: Annotated[
        bool, typer.Option("--render", help="Only write the report from the results.")
    ] = False,
    root: Annotated[Path, typer.Option(help="Environments, engines, results.")] = Path(
        "build/peers"
    ),
    output: Annotated[Path, typer.Option(help="The report.")] = Path("docs/benchmarks.md"),
) -> None:
    """An engine that cannot be installed or run is reported with the reason, the rest goes on."""
    run = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S")
    workspace = Workspace(root, threads, run)
    results = Results.read(workspace.results)
    known = scenarios.load()
    if not render:
        workspace.claim()
        chosen = _choose(known, [one.name for one in known], scenario, "scenario")
        engines = _choose(ENGINES, [one.name for one in ENGINES], only, "engine")
        models = _choose(MODELS.values(), list(MODELS), model, "model")
        results.machine = _machine()
        for one in models:
            mine = [engine for engine in engines if one.name in engine.models]
            with Field(workspace, one, results) as field:
                _load(workspace, field, one, mine, results, reuse=reuse)
                for each in chosen if speed else []:
                    typer.echo(f"{one.name}, {each.name}: {each.description}", err=True)
                    field.measure(each, rounds or each.runs)
                if score and one.has_text:
                    typer.echo(f"{one.name}, quality", err=True)
                    field.score(quality.token_ids(workspace.checkpoint(one)))
    results.write(workspace.results)
    plotted = _plot(workspace, results, known, output)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(report.markdown(results, known, plotted), encoding="utf-8")
    typer.echo(f"wrote {output}", err=True)


def _load(
    workspace: Workspace,
    field: Field,
    model: Model,
    engines: list[Engine],
    results: Results,
    *,
    reuse: bool,
) -> None:
    checkpoints.ensure(model.name, workspace.checkpoint(model))
    for engine in engines:
        typer.echo(f"{model.name}: {engine.name}", err=True)
        key = f"{model.name}/{engine.name}"
        results.unavailable.pop(key, None)
        try:
            _install(workspace, engine.peer, results)
            prepare(workspace, model, engine, reuse_octavo=reuse)
            field.load(engine)
        except PeerError as error:
            typer.echo(f"  {error}", err=True)
            results.unavailable[key] = str(error)
    results.write(workspace.results)


def _install(workspace: Workspace, name: str, results: Results) -> None:
    peer, root = PEERS[name], workspace.environment(name)
    if peer.in_own_environment:
        environments.install(name, root, peer.npm)
    results.versions[name] = environments.versions(peer, root)
    with workspace.process(name, f"versions-{name}") as process:
        results.versions[name] |= process.request("versions")


def _plot(
    workspace: Workspace, results: Results, known: list[scenarios.Scenario], output: Path
) -> bool:
    """Whether there is a picture beside the report."""
    root = workspace.environment("plot")
    try:
        environments.install("plot", root)
        report.plot(results, known, root / "bin" / "python", output.with_suffix(".svg"))
    except PeerError as error:
        typer.echo(f"no picture: {error}", err=True)
        return False
    return True


def _choose(found: Iterable[T], names: list[str], wanted: list[str] | None, kind: str) -> list[T]:
    for name in wanted or ():
        if name not in names:
            raise OctavoError(f"there is no {kind} {name!r}: choose from {', '.join(names)}")
    return [one for one, name in zip(found, names, strict=True) if not wanted or name in wanted]


def _machine() -> dict[str, str]:
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = [line.partition(":")[2].strip() for line in cpuinfo if line.startswith("model name")]
    features = [name for name in CPU_FEATURES if name in host.cpu_features()]
    return {
        "processor": (models or ["unknown"])[0],
        "architecture": host.architecture(),
        "cores": str(len(os.sched_getaffinity(0))),
        "instruction sets": ", ".join(features),
        "system": platform.system(),
    }


if __name__ == "__main__":
    app()
