"""A loaded ONNX Runtime engine: one session, the caches bound in place."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from octavo.backends import kernels
from octavo.backends.base import LoadOptions, StepInputs, StepOutputs
from octavo.backends.page_in import PageIn
from octavo.graphs import bindings
from octavo.graphs.errors import BackendError

if TYPE_CHECKING:
    from octavo.backends.manifest import Manifest

_INPUT_NAMES = tuple(field.name for field in fields(StepInputs))


class OnnxRuntimeExecutable:
    """Weights are mapped from the file; logits are written to one buffer that is used again."""

    def __init__(self, model: Path, manifest: Manifest, options: LoadOptions) -> None:
        self._manifest = manifest
        self._session: ort.InferenceSession | None = _session(model, options)
        self._binding = self._session.io_binding()
        self._vocab_size = manifest.spec.vocab_size
        self._logits = np.empty((0, self._vocab_size), np.float32)
        self._caches: list[ort.OrtValue] = []
        self._cache_arrays: list[NDArray[Any]] = []  # the memory of `_caches`
        self._page_in: PageIn | None = None
        self._bound: StepInputs | None = None
        self._outputs = StepOutputs(self._logits)

    def allocate_kv_cache(self, num_blocks: int) -> None:
        if self._session is None:
            raise BackendError("the engine is closed: load it again")
        self._free_caches()  # before the new ones are made
        layers = self._manifest.spec.kv_cache_bindings(
            self._manifest.limits.block_size, self._manifest.kv_cache_dtype
        )
        for binding in layers:
            sizes = [int(size) for size in binding.shape[1:]]
            array = np.zeros((num_blocks, *sizes), np.dtype(binding.dtype))
            cache = ort.OrtValue.ortvalue_from_numpy(array)
            self._binding.bind_ortvalue_input(binding.name, cache)
            self._binding.bind_ortvalue_output(bindings.cache_output_name(binding.name), cache)
            self._caches.append(cache)
            self._cache_arrays.append(array)
        self._page_in = PageIn(self._cache_arrays)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        if not self._cache_arrays:
            raise BackendError("the engine is closed or has no cache: call allocate_kv_cache first")
        for array in self._cache_arrays:
            for source, destination in copies:
                array[destination] = array[source]

    def run(self, inputs: StepInputs) -> StepOutputs:
        if self._session is None or not self._caches:
            raise BackendError("the engine is closed or has no cache: call allocate_kv_cache first")
        try:
            if inputs is not self._bound:
                self._bind(inputs)
            self._session.run_with_iobinding(self._binding)
        except Exception as error:
            raise BackendError(f"ONNX Runtime failed in a step: {error}") from error
        return self._outputs

    def _bind(self, inputs: StepInputs) -> None:
        """Binds the step's memory. The object is kept, so it tells that nothing else is bound."""
        self._bound = None
        for name in _INPUT_NAMES:
            _bind_array(self._binding.bind_input, name, getattr(inputs, name))
        logits = self._logits_buffer(len(inputs.logits_indices))
        _bind_array(self._binding.bind_output, bindings.LOGITS_NAME, logits)
        self._outputs = StepOutputs(logits)
        self._bound = inputs

    def close(self) -> None:
        self._free_caches()
        self._session = None

    def _free_caches(self) -> None:
        if self._page_in is not None:
            self._page_in.stop()
            self._page_in = None
        self._binding.clear_binding_inputs()
        self._binding.clear_binding_outputs()
        self._bound = None
        self._caches.clear()
        self._cache_arrays.clear()

    def _logits_buffer(self, rows: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
        if rows > len(self._logits):
            self._logits = np.empty((rows, self._vocab_size), np.float32)
        return self._logits[:rows]


def _bind_array(bind: Callable[..., None], name: str, array: NDArray[Any]) -> None:
    bind(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)


def _session(model: Path, options: LoadOptions) -> ort.InferenceSession:
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = options.num_threads or len(os.sched_getaffinity(0))
    settings.inter_op_num_threads = 1
    settings.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    settings.log_severity_level = 3
    settings.register_custom_ops_library(str(kernels.library_path()))
    try:
        return ort.InferenceSession(str(model), settings, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise BackendError(
            f"ONNX Runtime {ort.__version__} cannot load {model}: {error}"
        ) from error
