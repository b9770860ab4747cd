"""What is built and run on a GPU, and how near its logits come to those of the oracle."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from octavo.backends import registry
from octavo.backends.base import EngineKind
from octavo.graphs.errors import OctavoError
from octavo.graphs.spec import FloatDType

# Largest difference from PyTorch's float32 on a CPU, relative to the largest logit.
TOLERANCES: dict[FloatDType, float] = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}


@dataclass(frozen=True)
class Kind:
    backend: str
    dtype: FloatDType

    @property
    def asked(self) -> EngineKind:
        return EngineKind(dtype=self.dtype, kv_cache_dtype=self.dtype, device="cuda")

    @property
    def obstacle(self) -> str | None:
        """Why this machine does not build and run it."""
        try:
            backend = registry.get(self.backend)
            backend.require(self.asked, 16)
        except OctavoError as error:
            return str(error)
        return backend.can_build(self.asked).reason or backend.can_run("cuda").reason

    def __str__(self) -> str:
        return f"{self.backend}-{self.dtype}"


KINDS = (
    Kind("inductor", "float32"),
    Kind("inductor", "bfloat16"),
    Kind("onnxruntime", "float16"),
    Kind("onnxruntime", "bfloat16"),
    Kind("tensorrt", "float16"),
    Kind("tensorrt_rtx", "float16"),
    Kind("torch_tensorrt", "float16"),
)


def require(kind: Kind) -> None:
    """Skips a test of what is not installed here, with the reason."""
    if kind.obstacle is not None:
        pytest.skip(f"{kind}: {kind.obstacle}")
