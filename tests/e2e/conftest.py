"""The real model, built and loaded once for all tests of this layer."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from octavo.backends.bundle import MANIFEST_NAME
from octavo.compiler import BuildConfig, build_engine
from octavo.compiler.checkpoints import Checkpoint, open_checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SMOLLM2 = "smollm2-135m-instruct"


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """OpenMP's threads, which wait by spinning, make PyTorch 15 times slower on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# Options of the builds of SmolLM2 that have to be exact, each in its own way of computing.
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "int8-cache": {"quantization": "int8", "kv_cache_dtype": "int8"},
}


class Engines:
    """SmolLM2-135M-Instruct for the default backend in each precision, built when first asked for.

    `folder` is shared by the workers of a run: the first that asks builds, the others wait for it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __getitem__(self, precision: str) -> Path:
        output = self._folder / precision
        with (self._folder / f"{precision}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (output / MANIFEST_NAME).exists():
                options = PRECISIONS[precision]
                build_engine(BuildConfig(model=SMOLLM2, output=output, use_cache=False, **options))
        return output


@pytest.fixture(scope="session")
def smollm2_engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    shared = folder / "smollm2-engines"
    shared.mkdir(exist_ok=True)
    return Engines(shared)


@pytest.fixture(scope="session")
def smollm2_engine(smollm2_engines: Engines) -> Path:
    """In float32."""
    return smollm2_engines["float32"]


@pytest.fixture(scope="session")
def smollm2_checkpoint() -> Checkpoint:
    return open_checkpoint(SMOLLM2)


@pytest.fixture(scope="session")
def smollm2_model(smollm2_checkpoint: Checkpoint) -> PreTrainedModel:
    """The model of transformers, in float32."""
    return smollm2_checkpoint.load_model(torch.float32)
