"""The real model, built and loaded once for all tests of this layer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

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


@pytest.fixture(scope="session")
def smollm2_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct for the default backend."""
    output = tmp_path_factory.mktemp("engines") / SMOLLM2
    return build_engine(BuildConfig(model=SMOLLM2, output=output, use_cache=False)).path


# Options of the builds of SmolLM2 that have to be exact, each in its own way of computing.
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "int8-cache": {"quantization": "int8", "kv_cache_dtype": "int8"},
}


class Engines:
    """SmolLM2 in each precision, built when it is first asked for."""

    def __init__(self, float32: Path, folder: Path) -> None:
        self._built = {"float32": float32}
        self._folder = folder

    def __getitem__(self, precision: str) -> Path:
        if precision not in self._built:
            config = BuildConfig(
                model=SMOLLM2,
                output=self._folder / precision,
                use_cache=False,
                **PRECISIONS[precision],
            )
            self._built[precision] = build_engine(config).path
        return self._built[precision]


@pytest.fixture(scope="session")
def smollm2_engines(smollm2_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    return Engines(smollm2_engine, tmp_path_factory.mktemp("precisions"))


@pytest.fixture(scope="session")
def smollm2_checkpoint() -> Checkpoint:
    return open_checkpoint(SMOLLM2)


@pytest.fixture(scope="session")
def smollm2_model(smollm2_checkpoint: Checkpoint) -> PreTrainedModel:
    """The model of transformers, in float32."""
    return smollm2_checkpoint.load_model(torch.float32)
