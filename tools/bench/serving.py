"""The process a serving scenario is measured in: `python -m octavo.tools.bench.serving`.

Imports nothing before `main` but what serving itself needs, since start-up and memory are measured.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from typing import Any

import numpy as np

from octavo.runtime import LLM, RequestOutput, SamplingParams

SEED = 0


class Load:
    """Requests of random token ids, never the same twice: the prefix cache has nothing for them."""

    def __init__(self, llm: LLM, vocab_size: int) -> None:
        self._llm = llm
        self._vocab_size = vocab_size
        self._generator = np.random.default_rng(SEED)

    def run(self, num_seqs: int, prompt_tokens: int, output_tokens: int) -> list[RequestOutput]:
        ids = self._generator.integers(self._vocab_size, size=(num_seqs, prompt_tokens))
        params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
        return self._llm.generate([{"prompt_token_ids": row.tolist()} for row in ids], params)


def throughput(load: Load, scenario: dict[str, Any]) -> float:
    sizes = (scenario["num_seqs"], scenario["prompt_tokens"], scenario["output_tokens"])
    started = time.perf_counter()
    results = load.run(*sizes)
    seconds = time.perf_counter() - started
    return sum(len(result.outputs[0].token_ids) for result in results) / seconds


def time_to_first_token(load: Load, scenario: dict[str, Any]) -> float:
    (result,) = load.run(1, scenario["prompt_tokens"], 1)
    seconds = result.metrics.time_to_first_token
    assert seconds is not None, "a finished request has its first token"
    return seconds * 1e3


def peak_memory(load: Load, scenario: dict[str, Any]) -> float:
    load.run(scenario["num_seqs"], scenario["prompt_tokens"], scenario["output_tokens"])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def first_token(load: Load, scenario: dict[str, Any]) -> float:
    """On the system-wide monotonic clock: the parent subtracts when it started this process."""
    load.run(1, scenario["prompt_tokens"], 1)
    return time.monotonic()


KINDS = {
    "throughput": throughput,
    "time_to_first_token": time_to_first_token,
    "peak_memory": peak_memory,
    "first_token": first_token,
}
# One run a process: a second one would not start from nothing.
FRESH = {"first_token", "peak_memory"}


def main() -> None:
    """Arguments: engine folder, size of the vocabulary, scenario (JSON). Prints a JSON list."""
    engine, vocab_size, text = sys.argv[1:]
    scenario = json.loads(text)
    llm = LLM(engine, kv_cache_memory=scenario.get("kv_cache_memory", "512MiB"))
    load = Load(llm, int(vocab_size))
    measure = KINDS[scenario["kind"]]
    if scenario["kind"] in FRESH:
        values = [measure(load, scenario)]
    else:
        measure(load, scenario)  # warm-up
        values = [measure(load, scenario) for _ in range(scenario["runs"])]
    json.dump(values, sys.stdout)


if __name__ == "__main__":
    main()
