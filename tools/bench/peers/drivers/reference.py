"""transformers in float32: what perplexity and agreement are measured against."""

from __future__ import annotations

from typing import Any


class Driver:
    @staticmethod
    def prepare(model: str, output: str, options: dict[str, Any]) -> None:
        """Nothing: it reads the checkpoint."""

    def __init__(self, artefact: str, num_threads: int, options: dict[str, Any]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(num_threads)
        self._model: Any = AutoModelForCausalLM.from_pretrained(artefact, dtype=torch.float32)

    def logits(self, token_ids: list[int]) -> Any:
        import torch

        with torch.inference_mode():
            return self._model(torch.tensor([token_ids])).logits[0].numpy()
