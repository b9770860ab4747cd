"""Engines of random tiny models against Hugging Face, computed in several steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.backends import registry
from octavo.backends.base import LoadOptions
from octavo.backends.bundle import read_manifest
from octavo.compiler import BuildConfig, build_engine
from octavo.graphs.errors import UnsupportedModelError
from tests.backend.steps import Sequence, run_step
from tests.parity import tiny_models

LENGTH = 50


@pytest.mark.parametrize(
    ("model_type", "backend"),
    [
        ("llama", "onnxruntime"),
        ("llama", "torch"),
        ("qwen2", "onnxruntime"),  # biases
        ("qwen3", "onnxruntime"),  # norms of queries and keys
        ("gemma2", "onnxruntime"),  # capped scores, windows in every other layer
        ("mistral", "onnxruntime"),  # windows
        ("gpt2", "onnxruntime"),  # learned positions, LayerNorm, Conv1D
        ("phi3", "onnxruntime"),  # packed projections
        ("mixtral", "onnxruntime"),  # experts
        ("gpt_oss", "onnxruntime"),  # sinks
        ("gpt_oss", "torch"),
        ("deepseek_v3", "onnxruntime"),  # values of another head size than keys
    ],
)
def test_logits_equal_hugging_face(tmp_path: Path, model_type: str, backend: str) -> None:
    folder, model = tiny_models.checkpoint(tmp_path / "model", model_type)
    tokens = np.random.default_rng(0).integers(3, tiny_models.VOCAB_SIZE, LENGTH)
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens)[None]).logits[0].numpy()
    engine = build_engine(
        BuildConfig(
            model=str(folder),
            output=tmp_path / "engine",
            backend=backend,
            max_model_len=128,
            use_cache=False,
        )
    )
    manifest = read_manifest(engine.path)
    executable = registry.get(backend).load(engine.path, manifest, LoadOptions())
    executable.allocate_kv_cache(16)
    sequence = Sequence(tokens, blocks=[5, 2, 9, 4])
    other = Sequence(tokens[::-1].copy(), blocks=[1, 3, 6, 8])
    found = []
    for start, end in ((0, 21), (21, 22), (22, 38), (38, LENGTH)):
        logits = run_step(executable, [(other, start, end), (sequence, start, end)])
        found.append(logits[1])
    tolerance = 1e-4 * np.abs(expected).max()
    np.testing.assert_allclose(np.concatenate(found), expected, atol=tolerance, rtol=0)
    executable.close()


def test_what_mixes_tokens_outside_attention_is_refused_by_name(tmp_path: Path) -> None:
    folder, _ = tiny_models.checkpoint(tmp_path / "model", "lfm2")
    config = BuildConfig(model=str(folder), output=tmp_path / "engine", max_model_len=128)
    with pytest.raises(
        UnsupportedModelError, match="mixes tokens of different requests in Lfm2ShortConv"
    ):
        build_engine(config)
    assert not (tmp_path / "engine").exists()
