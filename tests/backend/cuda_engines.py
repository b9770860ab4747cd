"""Engines of tiny models for ONNX Runtime on CUDA, and PyTorch's to compare them with."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.backends import registry
from octavo.backends.base import Executable, LoadOptions
from octavo.backends.bundle import read_manifest
from octavo.compiler import BuildConfig, build_engine
from tests.backend.steps import Part, Sequence
from tests.parity import tiny_models
from tests.parity.tiny_models import VOCAB_SIZE

NUM_BLOCKS = 16
# Of the largest logit: what differently ordered sums in 10-bit mantissas may make of it.
TOLERANCE = 2e-2

SEQUENCE = Sequence(np.random.default_rng(0).integers(3, VOCAB_SIZE, 50), [5, 2, 9, 4])
OTHER = Sequence(np.random.default_rng(1).integers(3, VOCAB_SIZE, 37), [1, 13, 6])


def steps(block_size: int) -> list[list[Part]]:
    first, second = (
        dataclasses.replace(one, blocks=one.blocks[: -(-len(one.tokens) // block_size)])
        for one in (SEQUENCE, OTHER)
    )
    return [
        [(first, 0, 30)],  # a prefill
        [(first, 30, 47), (second, 0, 31)],  # a chunk beside another prefill
        [(second, 31, 32), (first, 47, 48)],  # decodes
        [(first, 48, 50), (second, 32, 37)],  # verifications
    ]


def assert_close(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> None:
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE * np.abs(wanted).max())


class CudaEngines:
    """Engines of one tiny model, for CUDA and for PyTorch, with the same weights in float16."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.checkpoint = functools.cache(self._checkpoint)
        self.build = functools.cache(self._build)

    def _checkpoint(self, model_type: str) -> Path:
        return tiny_models.checkpoint(self._folder / model_type, model_type)[0]

    def _build(
        self, model_type: str, backend: str = "onnxruntime", dtype: Any = "float16", size: int = 16
    ) -> Path:
        config = BuildConfig(
            model=str(self.checkpoint(model_type)),
            output=self._folder / f"{model_type}-{backend}-{dtype}-{size}",
            backend=backend,
            device="cuda" if backend == "onnxruntime" else "cpu",
            dtype=dtype,
            block_size=size,
            max_model_len=128,
            use_cache=False,
        )
        return build_engine(config).path

    def oracle(self, model_type: str, size: int) -> Executable:
        path = self.build(model_type, "torch", size=size)
        executable = registry.get("torch").load(path, read_manifest(path), LoadOptions(1))
        executable.allocate_kv_cache(NUM_BLOCKS)
        return executable


@pytest.fixture(scope="module")
def cuda_engines(tmp_path_factory: pytest.TempPathFactory) -> CudaEngines:
    return CudaEngines(tmp_path_factory.mktemp("cuda-engines"))
