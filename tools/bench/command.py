"""`octavo bench`: measures an engine on the scenarios of a folder."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.graphs.errors import OctavoError
from octavo.tools import console
from octavo.tools.bench.load.command import serve
from octavo.tools.bench.served import served

if TYPE_CHECKING:
    from octavo.tools.bench.measure import Result
    from octavo.tools.bench.scenario import Scenario

DEFAULT_MODEL = "smollm2-135m-instruct"
LIBRARIES = ("octavo", "numpy", "onnxruntime", "torch", "transformers")

app = console.application("Measures an engine on scenario files.")

Engine = Annotated[Path, typer.Argument(help="Folder of the engine.")]
Folder = Annotated[
    Path | None,
    typer.Option("--scenarios", help="Folder of scenario files.  [default: Octavo's own]"),
]
Only = Annotated[list[str] | None, typer.Option(help="Name of a scenario; repeat it for more.")]
Output = Annotated[Path | None, typer.Option(help="Also write the JSON to this file.")]


@app.command()
@console.reports_errors
def latency(
    engine: Engine, folder: Folder = None, only: Only = None, output: Output = None
) -> None:
    """Time to first token, between tokens, and to the end of a request."""
    _report(_choose(folder, only, "latency"), engine, None, output)


@app.command()
@console.reports_errors
def throughput(
    engine: Engine, folder: Folder = None, only: Only = None, output: Output = None
) -> None:
    """Generated tokens a second of requests sent at once."""
    _report(_choose(folder, only, "throughput"), engine, None, output)


@app.command()
@console.reports_errors
def prefix(engine: Engine, folder: Folder = None, only: Only = None, output: Output = None) -> None:
    """What the prefix cache takes off the time to first token of prompts that begin alike."""
    _report(_choose(folder, only, "prefix"), engine, None, output)


@app.command()
@console.reports_errors
def speculative(
    engine: Engine,
    folder: Folder = None,
    only: Only = None,
    output: Output = None,
    method: Annotated[
        str | None, typer.Option(help="Drafter, or options as generate's --speculative takes them.")
    ] = None,
) -> None:
    """Speed with drafts against the same engine without, and how many drafts are accepted."""
    from octavo.tools.speculative_options import drafters_to_use

    chosen = _choose(folder, only, "speculative")
    if method is not None:
        options = drafters_to_use(method)
        chosen = [one.model_copy(update={"speculative": options}) for one in chosen]
    _report(chosen, engine, None, output)


app.command("serve")(serve)
app.command("served")(served)


@app.command("all")
@console.reports_errors
def all_scenarios(
    model: Annotated[str, typer.Option(help="The checkpoint to build.")] = DEFAULT_MODEL,
    engine: Annotated[
        Path | None, typer.Option(help="Engine to serve.  [default: built from the model]")
    ] = None,
    quantization: Annotated[str, typer.Option(help="Of an engine that is built.")] = "none",
    folder: Folder = None,
    only: Only = None,
    output: Output = None,
) -> None:
    """Every scenario, start-up, build and memory too, for a checkpoint."""
    from octavo.tools.bench.measure import build

    chosen = _choose(folder, only)
    suffix = "" if quantization == "none" else f"-{quantization}"
    name = Path(model).name.removesuffix(".gguf") + suffix
    served = engine or Path("build", "engines", name)
    if engine is None:
        typer.echo(f"building {served}, unless the build cache has it", err=True)
        build(model, served, quantization=quantization)
    _report(chosen, served, model, output)


def _choose(folder: Path | None, only: list[str] | None, kind: str | None = None) -> list[Scenario]:
    from octavo.tools.bench import scenario as scenarios

    folder = scenarios.FOLDER if folder is None else folder
    found = [one for one in scenarios.load(folder) if kind in (None, one.kind)]
    names = [one.name for one in found]
    if not found:
        raise OctavoError(f"{folder} holds no scenarios of the kind {kind!r}")
    for name in only or ():
        if name not in names:
            raise OctavoError(f"there is no scenario {name!r}: choose from {', '.join(names)}")
    return [one for one in found if not only or one.name in only]


def _report(chosen: list[Scenario], engine: Path, model: str | None, output: Path | None) -> None:
    """Prints the report as JSON on stdout; progress and a table go to stderr."""
    from octavo.tools.bench.measure import measure

    results = []
    for number, one in enumerate(chosen, 1):
        typer.echo(f"[{number}/{len(chosen)}] {one.name}: {one.description}", err=True)
        results += measure(one, engine, model)
    report = {"machine": _machine(), "versions": _versions(), "results": _as_json(results)}
    console.print_json(report)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    _print(results)


def _machine() -> dict[str, Any]:
    from octavo.backends import host

    features = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_tile")
    return {
        "architecture": host.architecture(),
        "system": platform.system(),
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "cpu_features": [name for name in features if name in host.cpu_features()],
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _as_json(results: list[Result]) -> list[dict[str, Any]]:
    return [{**asdict(result), "meets_target": result.meets_target} for result in results]


def _print(results: list[Result]) -> None:
    table = console.table(
        "medians", "scenario", "metric", "median>", "least>", "most>", "unit", "target", "met"
    )
    for result in results:
        target = ""
        if result.at_most is not None:
            target = f"<= {result.at_most:g}"
        elif result.at_least is not None:
            target = f">= {result.at_least:g}"
        met = {None: "", True: "yes", False: "NO"}[result.meets_target]
        numbers = (result.median, min(result.values), max(result.values))
        table.add_row(
            result.name, result.metric, *(_number(n) for n in numbers), result.unit, target, met
        )
    console.print_tables(table, stderr=True)


def _number(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"
