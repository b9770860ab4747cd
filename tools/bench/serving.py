"""The process a serving scenario is measured in: `python -m octavo.tools.bench.serving`.

Imports nothing before `main` but what serving itself needs, since start-up and memory are measured.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from octavo.runtime import LLM, RequestOutput, SamplingParams

SEED = 0

Values = dict[str, Any]  # a scenario's fields
Series = dict[str, list[float]]  # the metrics of a run, in the units of `scenario.METRICS`


class Load:
    """Requests of random token ids, never the same twice: the prefix cache has nothing for them."""

    def __init__(self, llm: LLM, vocab_size: int) -> None:
        self.llm = llm
        self._vocab_size = vocab_size
        self._generator = np.random.default_rng(SEED)

    def draw(self, num_seqs: int, prompt_tokens: int) -> list[list[int]]:
        ids: list[list[int]] = self._generator.integers(
            self._vocab_size, size=(num_seqs, prompt_tokens)
        ).tolist()
        return ids

    def run(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> list[RequestOutput]:
        params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
        return self.llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], params)

    def generate(self, scenario: Values) -> list[RequestOutput]:
        prompts = self.draw(scenario["num_seqs"], scenario["prompt_tokens"])
        return self.run(prompts, scenario["output_tokens"])

    def time_to_first_token(self, prompt: Sequence[int]) -> tuple[float, int]:
        """Milliseconds, and how many tokens of the prompt were cached."""
        (result,) = self.run([prompt], 1)
        return _ms(result.metrics.time_to_first_token), result.num_cached_tokens


def throughput(load: Load, scenario: Values) -> Series:
    started = time.perf_counter()
    results = load.generate(scenario)
    seconds = time.perf_counter() - started
    return {"throughput": [sum(len(r.outputs[0].token_ids) for r in results) / seconds]}


def time_to_first_token(load: Load, scenario: Values) -> Series:
    milliseconds, _ = load.time_to_first_token(load.draw(1, scenario["prompt_tokens"])[0])
    return {"TTFT": [milliseconds]}


def latency(load: Load, scenario: Values) -> Series:
    metrics = [result.metrics for result in load.generate(scenario)]
    return {
        "TTFT": [_ms(m.time_to_first_token) for m in metrics],
        "between tokens": [_ms(m.time_per_output_token) for m in metrics],
        "end to end": [_ms(m.total_time) for m in metrics],
    }


def prefix(load: Load, scenario: Values) -> Series:
    (shared,) = load.draw(1, scenario["shared_tokens"])
    own = load.draw(1 + scenario["num_warm"], scenario["own_tokens"])
    (cold, _), *after = [load.time_to_first_token(shared + tail) for tail in own]
    warm = [milliseconds for milliseconds, _ in after]
    return {
        "reduction": [100 * (1 - statistics.median(warm) / cold)],
        "cold TTFT": [cold],
        "warm TTFT": warm,
        "cached tokens": [float(cached) for _, cached in after],
    }


def peak_memory(load: Load, scenario: Values) -> Series:
    load.generate(scenario)
    return {"resident": [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]}


def first_token(load: Load, scenario: Values) -> Series:
    """On the system-wide monotonic clock: the parent subtracts when it started this process."""
    load.run(load.draw(1, scenario["prompt_tokens"]), 1)
    return {"first token": [time.monotonic()]}


def _ms(seconds: float | None) -> float:
    assert seconds is not None, "a finished request has all its times"
    return seconds * 1e3


MEASURES = {
    "throughput": throughput,
    "time_to_first_token": time_to_first_token,
    "latency": latency,
    "prefix": prefix,
    "peak_memory": peak_memory,
    "first_token": first_token,
}
# One run a process: a second one would not start from nothing.
FRESH = {"first_token", "peak_memory"}


def main() -> None:
    """Arguments: engine folder, size of the vocabulary, scenario. Prints metric -> values."""
    engine, vocab_size, text = sys.argv[1:]
    scenario = json.loads(text)
    llm = LLM(engine, kv_cache_memory=scenario.get("kv_cache_memory", "512MiB"))
    load = Load(llm, int(vocab_size))
    measure = MEASURES[scenario["kind"]]
    if scenario["kind"] in FRESH:
        runs = [measure(load, scenario)]
    else:
        measure(load, scenario)  # warm-up
        runs = [measure(load, scenario) for _ in range(scenario["runs"])]
    json.dump({name: [x for run in runs for x in run[name]] for name in runs[0]}, sys.stdout)


if __name__ == "__main__":
    main()
