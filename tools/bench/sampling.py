"""`python -m octavo.tools.bench.sampling`: the native sampler alone, as steps of an engine use it.

Steps take turns with several arrays of logits, which push each other out of the nearest caches.
Times are of a whole step, with what Python does for it. "Peaked" rows have a few likely tokens, as
a model's mostly have; "flat" ones have thousands, the most work there is. The median of all runs
counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import typer

from octavo.backends import kernels
from octavo.backends.base import Float32Array
from octavo.runtime.sampling.sampler import LogprobsRow, Sampler, SamplingRow
from octavo.runtime.sampling.sampling_params import SamplingParams
from octavo.tools import console
from octavo.tools.bench import kernel_session

VOCAB_SIZE = 49152  # of SmolLM2
ROWS = (1, 32)
NUM_ARRAYS = 4  # that take turns
LIKELY_TOKENS = 40  # of a peaked row
PARAMETERS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"min_p": 0.05},
    {"top_k": 50},
    {"top_k": 50, "top_p": 0.9},
    {"top_k": 1000},
    {"top_p": 0.9},
    {"top_p": 0.999},
)
LOGPROBS = (0, 20, 300)

app = console.application("Measures the native sampler.")


@app.command()
def samplings(
    runs: Annotated[int, typer.Option(help="Measured runs, of which the median counts.")] = 51,
    rows: Annotated[list[int] | None, typer.Option(help="Rows; repeat it for more.")] = None,
    vocab_size: Annotated[int, typer.Option(help="Logits of a row.")] = VOCAB_SIZE,
) -> None:
    """Print the results as JSON on stdout."""
    results = []
    for count in rows or ROWS:
        for kind in ("peaked", "flat"):
            step = _Step(kind, count, vocab_size)
            results += [step.measure_sampling(values, runs) for values in PARAMETERS]
            results += [step.measure_logprobs(number, runs) for number in LOGPROBS]
    report = {
        "instruction_set": kernels.instruction_set(),
        "vocab_size": vocab_size,
        "results": results,
    }
    console.print_json(report)


class _Step:
    def __init__(self, kind: str, rows: int, vocab_size: int) -> None:
        generator = np.random.default_rng(0)
        self._about: dict[str, Any] = {"logits": kind, "rows": rows}
        self._arrays = [_logits(kind, rows, vocab_size, generator) for _ in range(NUM_ARRAYS)]
        self._sampler = Sampler(vocab_size)
        self._runs = 0

    def measure_sampling(self, values: dict[str, Any], runs: int) -> dict[str, Any]:
        params = SamplingParams(**values)

        def run() -> None:
            logits = self._next()
            self._sampler.sample([SamplingRow(row, params, 1, self._runs) for row in logits])

        return {**self._about, "parameters": values, "milliseconds": _milliseconds(run, runs)}

    def measure_logprobs(self, number: int, runs: int) -> dict[str, Any]:
        def run() -> None:
            logits = self._next()
            self._sampler.logprobs([LogprobsRow(row, 0, number) for row in logits])

        return {**self._about, "logprobs": number, "milliseconds": _milliseconds(run, runs)}

    def _next(self) -> Float32Array:
        self._runs += 1
        return self._arrays[self._runs % NUM_ARRAYS]


def _logits(kind: str, rows: int, vocab_size: int, generator: np.random.Generator) -> Float32Array:
    spread = 1.5 if kind == "peaked" else 2.5
    logits = generator.standard_normal((rows, vocab_size), np.float32) * np.float32(spread)
    if kind == "peaked":
        for row in logits:
            tokens = generator.integers(0, vocab_size, LIKELY_TOKENS)
            row[tokens] += 6 + generator.exponential(4, LIKELY_TOKENS)
    return logits


def _milliseconds(run: Callable[[], object], runs: int) -> float:
    run()
    return round(statistics.median(kernel_session.seconds_of(run, runs)) * 1e3, 3)


if __name__ == "__main__":
    app()
