"""OpenVINO GenAI: weights compressed by NNCF, served by its ContinuousBatchingPipeline."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("HF_HUB_OFFLINE", "1")


class Driver:
    """Options: `weights` (fp32, or arguments of OVWeightQuantizationConfig), `properties` of the
    CPU plugin, `scheduler` (attributes of SchedulerConfig)."""

    @staticmethod
    def prepare(model: str, output: str, options: dict[str, Any]) -> None:
        from optimum.intel import (  # type: ignore[import-not-found]
            OVModelForCausalLM,
            OVWeightQuantizationConfig,
        )

        weights = options["weights"]
        chosen: dict[str, Any] = {"load_in_8bit": False}  # else models above 1B are compressed
        if weights != "fp32":
            chosen = {"quantization_config": OVWeightQuantizationConfig(**weights)}
        exported = OVModelForCausalLM.from_pretrained(model, export=True, compile=False, **chosen)
        exported.save_pretrained(output)

    def __init__(self, artefact: str, num_threads: int, options: dict[str, Any]) -> None:
        import openvino_genai  # type: ignore[import-not-found]

        self._genai = openvino_genai
        self._artefact = artefact
        self._properties = {"INFERENCE_NUM_THREADS": num_threads, **options.get("properties", {})}
        scheduler = openvino_genai.SchedulerConfig()
        for name, value in options.get("scheduler", {}).items():
            setattr(scheduler, name, value)
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            artefact, scheduler, "CPU", self._properties
        )

    def generate(self, prompts: list[list[int]], max_tokens: int) -> tuple[float, list[list[int]]]:
        import openvino  # type: ignore[import-not-found]

        config = self._genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.ignore_eos = True
        config.do_sample = False
        tensors = [openvino.Tensor(np.array([ids], np.int64)) for ids in prompts]
        started = time.perf_counter()
        results = self._pipeline.generate(tensors, [config] * len(tensors))
        seconds = time.perf_counter() - started
        return seconds, [result.m_generation_ids[0] for result in results]

    def logits(self, token_ids: list[int]) -> Any:
        """Of the exported model itself, compiled with the same properties."""
        import openvino

        model = openvino.Core().compile_model(
            str(Path(self._artefact, "openvino_model.xml")), "CPU", self._properties
        )
        length = len(token_ids)
        inputs = {
            "input_ids": np.array([token_ids], np.int64),
            "attention_mask": np.ones((1, length), np.int64),
            "position_ids": np.arange(length, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        return model.create_infer_request().infer(inputs)["logits"][0]
