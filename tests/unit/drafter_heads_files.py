"""Random checkpoints of heads drafters, in the formats that their projects publish."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from octavo.compiler.checkpoints import Checkpoint
from octavo.compiler.drafters import TargetFacts

VOCAB_SIZE = 40
HIDDEN_SIZE = 16

Tensors = dict[str, NDArray[Any]]


def target_facts(
    path: Path = Path("target"), vocab_size: int = VOCAB_SIZE, hidden_size: int = HIDDEN_SIZE
) -> TargetFacts:
    """Of a model of which the heads' checkpoints read nothing but its path, for messages."""
    checkpoint = cast(Checkpoint, SimpleNamespace(path=path))
    return TargetFacts(checkpoint, hidden_size, vocab_size, num_layers=2, model_type="llama")


def write(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, NDArray[Any]],
    file: str = "model.safetensors",
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / file)
    return folder


def random_tensors(shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
    """Wide enough that every layer changes which token is the likeliest."""
    generator = np.random.default_rng(7)
    return {
        name: generator.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()
    }


def medusa_tensors(
    num_heads: int = 3,
    num_layers: int = 1,
    *,
    vocab_size: int = VOCAB_SIZE,
    hidden_size: int = HIDDEN_SIZE,
) -> Tensors:
    """As FasterDecoding/Medusa names them in medusa_lm_head.safetensors."""
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            shapes[f"{head}.{layer}.linear.weight"] = (hidden_size, hidden_size)
            shapes[f"{head}.{layer}.linear.bias"] = (hidden_size,)
        shapes[f"{head}.{num_layers}.weight"] = (vocab_size, hidden_size)
    return random_tensors(shapes)


def converted_medusa_tensors(
    num_heads: int = 3,
    num_layers: int = 1,
    *,
    vocab_size: int = VOCAB_SIZE,
    hidden_size: int = HIDDEN_SIZE,
) -> Tensors:
    """As vLLM names them."""
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            shapes[f"blocks.{head}.layers.{layer}.weight"] = (hidden_size, hidden_size)
        shapes[f"lm_heads.{head}.weight"] = (vocab_size, hidden_size)
    return random_tensors(shapes)


def converted_medusa_config(num_heads: int = 3, **changes: Any) -> dict[str, Any]:
    config = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": HIDDEN_SIZE,
        "vocab_size": VOCAB_SIZE,
        "num_heads": num_heads,
        "num_hidden_layers": 1,
    }
    return {**config, **changes}


def speculator_tensors(
    n_predict: int = 3,
    *,
    inner_size: int = 12,
    is_tied: bool = False,
    vocab_size: int = VOCAB_SIZE,
    hidden_size: int = HIDDEN_SIZE,
) -> Tensors:
    """As IBM names them; of tied ones `save_pretrained` keeps the first."""
    shapes: dict[str, tuple[int, ...]] = {}
    for stage in range(n_predict):
        if stage == 0 or not is_tied:
            shapes[f"speculator.emb.{stage}.weight"] = (vocab_size, inner_size)
            shapes[f"speculator.head.{stage}.weight"] = (vocab_size, inner_size)
            shapes[f"speculator.ln.{stage}.weight"] = (inner_size,)
            shapes[f"speculator.ln.{stage}.bias"] = (inner_size,)
        if stage < 2 or not is_tied:
            size = inner_size if stage else hidden_size
            shapes[f"speculator.proj.{stage}.weight"] = (inner_size, size)
    return random_tensors(shapes)


def speculator_config(n_predict: int = 3, **changes: Any) -> dict[str, Any]:
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "emb_dim": HIDDEN_SIZE,
        "inner_dim": 12,
        "vocab_size": VOCAB_SIZE,
        "n_predict": n_predict,
        "n_candidates": 5,
        "top_k_tokens_per_head": [4, 3, 2][:n_predict],
        "tie_weights": False,
        "scale_input": False,
    }
    return {**config, **changes}
