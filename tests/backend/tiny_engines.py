"""Engines of random tiny models, built once for all tests of a module."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from octavo.backends import registry
from octavo.backends.base import Executable, LoadOptions
from octavo.backends.bundle import read_manifest
from octavo.backends.manifest import Manifest
from octavo.compiler import BuildConfig, build_engine
from tests.backend.steps import Sequence
from tests.parity import tiny_models

NUM_BLOCKS = 16
Logits = NDArray[np.float32]


@dataclass(frozen=True)
class TinyEngine:
    path: Path
    model: PreTrainedModel
    checkpoint: Path

    @property
    def manifest(self) -> Manifest:
        return read_manifest(self.path)

    def load(self, num_threads: int | None = None) -> Executable:
        """The executable, with a cache of NUM_BLOCKS blocks."""
        manifest = self.manifest
        backend = registry.get(manifest.backend)
        executable = backend.load(self.path, manifest, LoadOptions(num_threads))
        executable.allocate_kv_cache(NUM_BLOCKS)
        return executable

    def expected(self, sequence: Sequence) -> Logits:
        """The logits [len, V] that transformers computes."""
        with torch.no_grad():
            tokens = torch.from_numpy(np.asarray(sequence.tokens, np.int64))
            logits: Logits = self.model(tokens[None]).logits[0].numpy()
        return logits


class TinyEngines:
    """Builds an engine of a model type for a backend when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.get = functools.cache(self._build)

    def _build(self, backend: str, model_type: str, **options: Any) -> TinyEngine:
        checkpoint, model = tiny_models.checkpoint(self._folder / model_type, model_type)
        config = BuildConfig(
            model=str(checkpoint),
            output=self._folder / "-".join([model_type, backend, *map(str, options.values())]),
            backend=backend,
            max_model_len=128,
            use_cache=False,
            **options,
        )
        return TinyEngine(build_engine(config).path, model, checkpoint)


@pytest.fixture(scope="module")
def tiny_engines(tmp_path_factory: pytest.TempPathFactory) -> TinyEngines:
    return TinyEngines(tmp_path_factory.mktemp("tiny-engines"))
