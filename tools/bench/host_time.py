"""How long a decode step takes outside the compiled graph, which is all Python: planning, packing,
sampling, committing. The process of a scenario: `python -m octavo.tools.bench.host_time`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from octavo.backends.base import AcceptInputs, Executable, Int32Array, StepInputs, StepOutputs
from octavo.backends.bundle import read_manifest
from octavo.runtime import SamplingParams
from octavo.runtime.capacity import resolve_limits
from octavo.runtime.engine import Engine
from octavo.runtime.loading import load_engine
from octavo.runtime.request import Request

SEED = 0


class TimedExecutable:
    """Passes everything on, and tells how long the last run took and how many tokens it had."""

    def __init__(self, executable: Executable) -> None:
        self._executable = executable
        self.seconds = 0.0
        self.num_tokens = 0

    def allocate_kv_cache(self, num_blocks: int) -> None:
        self._executable.allocate_kv_cache(num_blocks)

    def run(self, inputs: StepInputs) -> StepOutputs:
        started = time.perf_counter()
        outputs = self._executable.run(inputs)
        self.seconds = time.perf_counter() - started
        self.num_tokens = len(inputs.token_ids)
        return outputs

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        self._executable.copy_blocks(copies)

    def accept(self, inputs: AcceptInputs) -> Int32Array:
        return self._executable.accept(inputs)

    def close(self) -> None:
        self._executable.close()


def host_time(bundle: Path, scenario: dict[str, Any]) -> dict[str, list[float]]:
    """Milliseconds of every step in which all sequences decode: outside the graph, and in all."""
    manifest = read_manifest(bundle)
    limits = resolve_limits(
        manifest,
        kv_cache_memory="512MiB",
        num_kv_blocks=None,
        max_num_seqs=None,
        max_num_batched_tokens=None,
    )
    timed = TimedExecutable(load_engine(bundle, manifest, None).executable)
    engine = Engine(timed, limits, sampled_vocab_size=manifest.spec.sampled_vocab_size)
    num_seqs, num_tokens = scenario["num_seqs"], scenario["prompt_tokens"]
    params = SamplingParams(temperature=0.0, max_tokens=scenario["output_tokens"], ignore_eos=True)
    generator = np.random.default_rng(SEED)
    for index in range(num_seqs):
        engine.add_request(
            Request(
                str(index),
                generator.integers(manifest.spec.sampled_vocab_size, size=num_tokens).tolist(),
                params,
                max_model_len=limits.max_model_len,
                eos_token_ids=(),
                seed=index,
            )
        )
    host, steps = [], []
    while engine.has_unfinished_requests:
        started = time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - started
        if timed.num_tokens == num_seqs:
            host.append(1e3 * (seconds - timed.seconds))
            steps.append(1e3 * seconds)
    timed.close()
    return {"host time": host, "step": steps}


if __name__ == "__main__":
    json.dump(host_time(Path(sys.argv[1]), json.loads(sys.argv[2])), sys.stdout)
