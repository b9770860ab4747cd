"""A loaded ONNX Runtime engine on a CPU: weights are mapped, steps are bound where they lie."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from octavo.backends.base import LoadOptions, StepInputs
from octavo.backends.onnxruntime.cache_memory_cpu import HostCacheMemory
from octavo.backends.onnxruntime.executable import OnnxRuntimeExecutable
from octavo.backends.onnxruntime.sessions import open_on_cpu

if TYPE_CHECKING:
    from octavo.backends.manifest import Manifest


class CpuExecutable(OnnxRuntimeExecutable):
    def __init__(self, model: Path, manifest: Manifest, options: LoadOptions) -> None:
        session = open_on_cpu(model, options.num_threads)
        layers = manifest.spec.kv_cache_bindings(
            manifest.limits.block_size, manifest.kv_cache_dtype
        )
        super().__init__(model, manifest, session, HostCacheMemory(layers))

    def _prepare(self, inputs: StepInputs) -> None:
        if inputs is not self._bound:
            self._bind(inputs)
