"""ONNX Runtime GenAI: its model builder, and its Generator with a batch of equally long prompts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np

os.environ.setdefault("HF_HUB_OFFLINE", "1")


class Driver:
    """Options: `precision` and `extra_options` of the model builder."""

    @staticmethod
    def prepare(model: str, output: str, options: dict[str, Any]) -> None:
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
        command += ["-i", model, "-o", output, "-p", options["precision"], "-e", "cpu"]
        command += ["-c", output + ".cache"]
        if extra := options.get("extra_options"):
            command += ["--extra_options", *(f"{name}={value}" for name, value in extra.items())]
        subprocess.run(command, check=True, stdout=sys.stderr)

    def __init__(self, artefact: str, num_threads: int, options: dict[str, Any]) -> None:
        import onnxruntime_genai  # type: ignore[import-not-found]

        self._genai = onnxruntime_genai
        config = onnxruntime_genai.Config(artefact)
        session = {"intra_op_num_threads": num_threads, "inter_op_num_threads": 1}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
        self._model = onnxruntime_genai.Model(config)

    def generate(self, prompts: list[list[int]], max_tokens: int) -> tuple[float, list[list[int]]]:
        rows = np.array(prompts, np.int32)
        started = time.perf_counter()
        num_seqs, prompt_tokens = rows.shape
        generator = self._generator(num_seqs, prompt_tokens, max_tokens)
        generator.append_tokens(rows)
        for _ in range(max_tokens):
            generator.generate_next_token()
        results = [generator.get_sequence(i)[prompt_tokens:] for i in range(num_seqs)]
        return time.perf_counter() - started, [row.tolist() for row in results]

    def logits(self, token_ids: list[int]) -> Any:
        generator = self._generator(1, len(token_ids), 1)
        generator.append_tokens(np.array([token_ids], np.int32))
        return np.array(generator.get_output("logits"))[0]

    def _generator(self, num_seqs: int, prompt_tokens: int, max_tokens: int) -> Any:
        params = self._genai.GeneratorParams(self._model)
        length = prompt_tokens + max_tokens
        # A least length is how this library is told to ignore the end of the text.
        params.set_search_options(
            batch_size=num_seqs, min_length=length, max_length=length, do_sample=False
        )
        return self._genai.Generator(self._model, params)
