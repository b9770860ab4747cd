"""Octavo itself; runs in the environment of the harness."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np


class Driver:
    """Options: `quantization`, `checkpoint` (instead of the plain folder), `build` arguments."""

    @staticmethod
    def prepare(model: str, output: str, options: dict[str, Any]) -> None:
        command = [sys.executable, "-m", "octavo.tools.build_engine", "--no-cache"]
        command += ["--model", options.get("checkpoint", model), "--output", output]
        if options["quantization"] != "none":
            command += ["--quantization", options["quantization"]]
        subprocess.run([*command, *options.get("build", ())], check=True, stdout=sys.stderr)

    @staticmethod
    def versions() -> dict[str, str]:
        """The commit, where this runs in a checkout."""
        command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
        folder = Path(__file__).parent
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return {}
        return {"commit": done.stdout.strip()}

    def __init__(self, artefact: str, num_threads: int, options: dict[str, Any]) -> None:
        from octavo.runtime import LLM

        self._artefact = Path(artefact)
        self._num_threads = num_threads
        self._llm = LLM(artefact, num_threads=num_threads)

    def generate(
        self, prompts: list[list[int]], max_tokens: int
    ) -> tuple[float, list[tuple[int, ...]]]:
        from octavo.runtime import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        started = time.perf_counter()
        results = self._llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
        seconds = time.perf_counter() - started
        return seconds, [tuple(result.outputs[0].token_ids) for result in results]

    def logits(self, token_ids: list[int]) -> Any:
        """Straight from the executable: the scheduler asks for a prompt's last row only."""
        from octavo.backends.base import StepInputs
        from octavo.backends.bundle import read_manifest
        from octavo.runtime.loading import load_engine

        manifest = read_manifest(self._artefact)
        executable = load_engine(self._artefact, manifest, self._num_threads).executable
        blocks = -(-len(token_ids) // manifest.limits.block_size)
        executable.allocate_kv_cache(blocks)
        rows = []
        budget = manifest.limits.max_num_batched_tokens
        for start in range(0, len(token_ids), budget):
            step = np.array(token_ids[start : start + budget], np.int32)
            positions = np.arange(start, start + len(step), dtype=np.int32)
            outputs = executable.run(
                StepInputs(
                    token_ids=step,
                    positions=positions,
                    slot_mapping=positions,  # block i of the pool is block i of the sequence
                    block_tables=np.arange(blocks, dtype=np.int32)[None],
                    query_start_loc=np.array([0, len(step)], np.int32),
                    prefix_offsets=np.array([start], np.int32),
                    logits_indices=np.arange(len(step), dtype=np.int32),
                )
            )
            rows.append(outputs.logits.copy())
        executable.close()
        return np.concatenate(rows)
