"""`octavo bench served`: an engine behind its server beside the bare engine, in one run."""

from __future__ import annotations

import asyncio
import json
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.graphs.errors import OctavoError
from octavo.tools import console
from octavo.tools.bench.load.arrivals import prompts
from octavo.tools.bench.load.plan import LoadPlan
from octavo.tools.bench.load.report import LoadResult, summary

NUM_STREAMS = 32
OUTPUT_LEN = 128
INPUT_LEN = 32
NUM_WAITING = 8  # in the overload, beside those that run
SETTLE_SECONDS = 0.2


@console.reports_errors
def served(
    engine: Annotated[Path, typer.Argument(help="Folder of the engine.")],
    rounds: Annotated[int, typer.Option(min=1, help="Of the server and the bare engine.")] = 3,
    overload_seconds: Annotated[
        float, typer.Option(help="For which requests come twice as fast as they are answered.")
    ] = 40.0,
    output: Annotated[Path | None, typer.Option(help="Also write the JSON to this file.")] = None,
) -> None:
    """What the server leaves of the engine's speed, and what twice too much load does to it."""
    streams = LoadPlan(
        url="http://none",
        concurrency=NUM_STREAMS,
        num_requests=NUM_STREAMS,
        input_len=INPUT_LEN,
        output_len=OUTPUT_LEN,
    )
    report = {
        "streams": _streams(engine, streams, rounds),
        "overload": _overload(engine, streams, overload_seconds),
    }
    console.print_json(report)
    if output is not None:
        output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _streams(engine: Path, plan: LoadPlan, rounds: int) -> dict[str, Any]:
    """Tokens a second of the same requests, served and bare."""
    rates: dict[str, list[float]] = {"served": [], "bare": []}
    for number in range(rounds):
        plan = replace(plan, seed=number)
        rates["bare"].append(_bare(engine, plan))
        with _server(engine) as url:
            rates["served"].append(_load(replace(plan, url=url)).output_throughput)
        typer.echo(
            f"[{number + 1}/{rounds}] served {rates['served'][-1]:.1f} tokens/s, bare "
            f"{rates['bare'][-1]:.1f}",
            err=True,
        )
    ratios = [one / other for one, other in zip(rates["served"], rates["bare"], strict=True)]
    return {
        "tokens_per_s": rates,
        "served_to_bare": {
            "median": statistics.median(ratios), "least": min(ratios), "most": max(ratios),
        },
    }  # fmt: skip


def _overload(engine: Path, plan: LoadPlan, seconds: float) -> dict[str, Any]:
    """The same server with as many streams as it runs at once, and with twice what it can do."""
    plan = replace(plan, concurrency=None, output_len=OUTPUT_LEN // 2)
    options = (f"--max-num-seqs={NUM_STREAMS}", f"--max-open-requests={NUM_STREAMS + NUM_WAITING}")
    with _server(engine, *options) as url:
        plan = replace(plan, url=url)
        full = _load(replace(plan, concurrency=NUM_STREAMS, num_requests=4 * NUM_STREAMS))
        rate = 2 * full.output_throughput / plan.output_len
        count = max(1, round(rate * seconds))
        twice = _load(replace(plan, request_rate=rate, num_requests=count, seed=1))
    return {"full": _figures(full), "requests_per_s": rate, "twice": _figures(twice)}


def _figures(result: LoadResult) -> dict[str, Any]:
    counts = result.as_json()["requests"]
    return {
        "requests": counts,
        "tokens_per_s": result.output_throughput,
        **{f"{name}_ms": summary(result.latencies(name)) for name in ("ttft", "tpot", "e2e")},
    }


def _load(plan: LoadPlan) -> LoadResult:
    from octavo.tools.bench.load.runner import run_load

    return asyncio.run(run_load(plan))


def _bare(engine: Path, plan: LoadPlan) -> float:
    """In a process of its own, as the server's engine is."""
    texts = json.dumps(prompts(plan)[-plan.num_requests - 1 :])
    command = [sys.executable, "-m", __name__, str(engine), texts]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OctavoError(f"the bare engine failed: {done.stderr.strip()[-200:]}")
    return plan.num_requests * plan.output_len / float(done.stdout)


@contextmanager
def _server(engine: Path, *options: str) -> Iterator[str]:
    """The url of a server that is ready."""
    command = [sys.executable, "-m", "octavo.tools.main", "serve", str(engine), "--port=0"]
    process = subprocess.Popen(
        [*command, "--no-access-log", "--log-level=warning", *options],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip().rpartition(" ")[2]
        asyncio.run(_ready(url))
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
        process.stdout.close()


async def _ready(url: str) -> None:
    import aiohttp

    try:
        async with aiohttp.ClientSession() as session:
            while True:
                async with session.get(f"{url}/ready") as answer:
                    if answer.status == 200:
                        return
                await asyncio.sleep(SETTLE_SECONDS)
    except aiohttp.ClientError:
        raise OctavoError("the server did not start: what it says is above") from None


def main() -> None:
    """The bare engine: prints the seconds that all prompts but the first, the warm-up, take."""
    import time

    from octavo.runtime import LLM, SamplingParams

    engine, text = sys.argv[1:]
    warmup, *measured = json.loads(text)
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_LEN, ignore_eos=True)
    with LLM(engine) as llm:
        llm.generate([warmup], params)
        start = time.perf_counter()
        llm.generate(measured, params)
        print(time.perf_counter() - start)


if __name__ == "__main__":
    main()
