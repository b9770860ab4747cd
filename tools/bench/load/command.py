"""`octavo bench serve`: load on a server that runs already."""

from __future__ import annotations

import asyncio
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from octavo.graphs.errors import OctavoError
from octavo.tools import console
from octavo.tools.bench.load.plan import LoadPlan, Objectives

if TYPE_CHECKING:
    from octavo.tools.bench.load.report import LoadResult

SCENARIOS = Path(__file__).parent / "scenarios"


@console.reports_errors
def serve(
    url: Annotated[str, typer.Option(help="Of the server, such as http://127.0.0.1:8000.")],
    protocol: Annotated[
        Literal["openai", "triton"] | None, typer.Option(help="[default: openai]")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="[default: the first that an OpenAI server names]")
    ] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OCTAVO_API_KEY")] = None,
    scenario: Annotated[
        str | None,
        typer.Option(
            help="A JSON file with a plan, or one of steady, streams_32 and shared_prefix; other "
            "options win over it."
        ),
    ] = None,
    num_requests: Annotated[int | None, typer.Option(help="[default: 100]")] = None,
    request_rate: Annotated[
        float | None,
        typer.Option(
            help="Requests a second, whatever the server does; inf: all at once. [default: inf]"
        ),
    ] = None,
    arrivals: Annotated[
        Literal["poisson", "constant"] | None,
        typer.Option(help="How they are spread. [default: poisson]"),
    ] = None,
    sweep: Annotated[
        str | None, typer.Option(help="Several rates, one run each, such as 1,2,4,8.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="Instead of a rate: requests that run at once.")
    ] = None,
    input_len: Annotated[int | None, typer.Option(help="Words of a prompt. [default: 128]")] = None,
    prefix_len: Annotated[
        int | None, typer.Option(help="First words that all prompts share. [default: 0]")
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help='JSON lines with a "prompt" each, taken in turn.'
        ),
    ] = None,
    output_len: Annotated[
        int | None, typer.Option(help="Tokens of an answer. [default: 64]")
    ] = None,
    chat: Annotated[
        bool | None, typer.Option("--chat", help="Chat completions instead of completions.")
    ] = None,
    count_chunks: Annotated[
        bool | None,
        typer.Option(
            "--count-chunks",
            help="Count each chunk as a token: for servers without continuous_usage_stats.",
        ),
    ] = None,
    disconnect_share: Annotated[
        float | None, typer.Option(help="Share of requests to leave at a random moment.")
    ] = None,
    slo: Annotated[
        str | None, typer.Option(help="What is good, such as ttft=500ms,tpot=50ms,e2e=10s.")
    ] = None,
    num_warmup: Annotated[int | None, typer.Option(help="[default: 2]")] = None,
    seed: Annotated[int | None, typer.Option(help="[default: 0]")] = None,
    output: Annotated[Path | None, typer.Option(help="Also write the JSON to this file.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw latencies, against rates or as shares, as SVG.")
    ] = None,
) -> None:
    """Put load on a server: latencies, throughput, and how many requests kept the objectives."""
    given = {
        "protocol": protocol,
        "model": model,
        "api_key": api_key,
        "num_requests": num_requests,
        "request_rate": request_rate,
        "arrivals": arrivals,
        "concurrency": concurrency,
        "input_len": input_len,
        "prefix_len": prefix_len,
        "output_len": output_len,
        "chat": chat,
        "count_chunks": count_chunks,
        "disconnect_share": disconnect_share,
        "num_warmup": num_warmup,
        "seed": seed,
        "prompts": None if prompt_file is None else _read_prompts(prompt_file),
        "objectives": None if slo is None else Objectives.parse(slo),
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    plan = LoadPlan(
        **{**({} if scenario is None else read_scenario(scenario)), **chosen, "url": url}
    )
    plans = (
        [plan] if sweep is None else [replace(plan, request_rate=rate) for rate in _rates(sweep)]
    )
    results = asyncio.run(_run(plans))
    _show(results, output, plot)


async def _run(plans: list[LoadPlan]) -> list[LoadResult]:
    from octavo.tools.bench.load.runner import run_load

    results = []
    for number, plan in enumerate(plans, 1):
        typer.echo(f"[{number}/{len(plans)}] {plan.num_requests} requests", err=True)
        results.append(await run_load(plan))
    return results


def read_scenario(name: str) -> dict[str, Any]:
    """Fields of a plan, from a file or one of Octavo's own; OctavoError if it is none."""
    path = Path(name) if name.endswith(".json") else SCENARIOS / f"{name}.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OctavoError(f"the scenario {path} cannot be read ({error})") from None
    known = {field.name for field in fields(LoadPlan)}
    if (
        not isinstance(values, dict)
        or not (unknown := set(values) - known - {"description"}) <= set()
    ):
        wrong = sorted(unknown) if isinstance(values, dict) else type(values).__name__
        raise OctavoError(
            f"the scenario {path} has {wrong}: give an object with fields of {sorted(known)}"
        )
    values.pop("description", None)
    if "objectives" in values:
        values["objectives"] = Objectives.parse(values["objectives"])
    if "prompts" in values:
        values["prompts"] = tuple(values["prompts"])
    return values


def _read_prompts(path: Path) -> tuple[str, ...]:
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, LookupError, TypeError):
            prompt = None
        if not isinstance(prompt, str):
            raise OctavoError(f'line {number} of {path} is no JSON object with a text "prompt"')
        prompts.append(prompt)
    if not prompts:
        raise OctavoError(f"{path} is empty: give a prompt a line")
    return tuple(prompts)


def _rates(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise console.usage_error(f"--sweep takes rates such as 1,2,4, not {text!r}") from None


def _show(results: list[LoadResult], output: Path | None, plot: Path | None) -> None:
    from octavo.tools.bench.load.plot import picture
    from octavo.tools.bench.load.report import tables

    report = [result.as_json() for result in results]
    console.print_json(report)
    if output is not None:
        output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if plot is not None:
        plot.write_text(picture(results), encoding="utf-8")
    console.print_tables(*tables(results), stderr=True)
    for warning in {result.warning for result in results} - {None}:
        typer.echo(f"warning: {warning}", err=True)
