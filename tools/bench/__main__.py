"""`python -m octavo.tools.bench`: measures the scenarios and reports them."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.backends import host
from octavo.graphs.errors import OctavoError
from octavo.tools import console
from octavo.tools.bench import scenario as scenarios
from octavo.tools.bench.measure import Result, build, measure

DEFAULT_MODEL = "smollm2-135m-instruct"
LIBRARIES = ("octavo", "numpy", "onnxruntime", "torch", "transformers")

app = console.application("Measures Octavo on the scenarios of a folder.")


@app.command()
@console.reports_errors
def bench(
    model: Annotated[str, typer.Option(help="The checkpoint to build.")] = DEFAULT_MODEL,
    engine: Annotated[
        Path | None, typer.Option(help="Engine to serve.  [default: built from the model]")
    ] = None,
    folder: Annotated[
        Path, typer.Option("--scenarios", exists=True, file_okay=False, help="Scenario files.")
    ] = scenarios.FOLDER,
    only: Annotated[
        list[str] | None, typer.Option(help="Name of a scenario; repeat it for more.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Also write the JSON to this file.")] = None,
) -> None:
    """Print the report as JSON on stdout; progress and a table go to stderr."""
    chosen = _choose(scenarios.load(folder), only)
    served = engine or Path("build", "engines", Path(model).name.removesuffix(".gguf"))
    if engine is None:
        typer.echo(f"building {served}, unless the build cache has it", err=True)
        build(model, served)
    results = []
    for number, one in enumerate(chosen, 1):
        typer.echo(f"[{number}/{len(chosen)}] {one.name}: {one.description}", err=True)
        results.append(measure(one, model, served))
    report = {"machine": _machine(), "versions": _versions(), "results": _as_json(results)}
    console.print_json(report)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    _print(results)


def _choose(found: list[scenarios.Scenario], only: list[str] | None) -> list[scenarios.Scenario]:
    names = [one.name for one in found]
    for name in only or ():
        if name not in names:
            raise OctavoError(f"there is no scenario {name!r}: choose from {', '.join(names)}")
    return [one for one in found if not only or one.name in only]


def _machine() -> dict[str, Any]:
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
        "medians", "scenario", "median>", "least>", "most>", "unit", "target", "met"
    )
    for result in results:
        target = ""
        if result.at_most is not None:
            target = f"<= {result.at_most:g}"
        elif result.at_least is not None:
            target = f">= {result.at_least:g}"
        met = {None: "", True: "yes", False: "NO"}[result.meets_target]
        numbers = (result.median, min(result.values), max(result.values))
        table.add_row(result.name, *(_number(n) for n in numbers), result.unit, target, met)
    console.print_tables(table, stderr=True)


def _number(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


if __name__ == "__main__":
    app()
