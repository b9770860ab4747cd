"""Opening ONNX graphs on a device."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime as ort
from numpy.typing import NDArray

from octavo.backends import kernels
from octavo.graphs.errors import BackendError

CUDA_DEVICE_ID = 0  # CUDA_VISIBLE_DEVICES chooses which one that is

_CUDA_PROVIDER = "CUDAExecutionProvider"
_CPU_PROVIDER = "CPUExecutionProvider"
_CUDA_OPTIONS = {
    "device_id": str(CUDA_DEVICE_ID),
    # Large buffers are not rounded up to powers of two: the cache is to have that memory.
    "arena_extend_strategy": "kSameAsRequested",
    "use_tf32": "0",  # what the model computes in float32 keeps its 24 bits
}


def open_on_cpu(model: Path, num_threads: int | None) -> ort.InferenceSession:
    """With Octavo's own kernels."""
    settings = _settings(num_threads, ort.GraphOptimizationLevel.ORT_ENABLE_BASIC)
    settings.register_custom_ops_library(str(kernels.library_path()))
    return _opened(model, settings, [_CPU_PROVIDER])


def open_on_cuda(model: Path, num_threads: int | None) -> ort.InferenceSession:
    """With the CPU only for what ONNX Runtime keeps there itself: the arithmetic of shapes.

    Raises BackendError where CUDA cannot be used: ONNX Runtime would go on without it.
    """
    if _CUDA_PROVIDER not in ort.get_available_providers():
        raise BackendError(
            f"onnxruntime {ort.__version__} has no CUDA here, which the engine was built for: "
            "uninstall onnxruntime, then install Octavo with its extra [cuda]"
        )
    ort.preload_dlls()  # CUDA's libraries as pip installs them
    settings = _settings(num_threads, ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED)
    session = _opened(model, settings, [(_CUDA_PROVIDER, _CUDA_OPTIONS), _CPU_PROVIDER])
    if _CUDA_PROVIDER not in session.get_providers():
        raise BackendError(
            f"onnxruntime {ort.__version__} could not start CUDA, it printed why: install the CUDA "
            "and cuDNN libraries that its release needs"
        )
    return session


def bind_array(bind: Callable[..., None], name: str, array: NDArray[Any]) -> None:
    """Binds host memory where it lies; `bind` is a method of a session's binding."""
    bind(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)


def _settings(
    num_threads: int | None, optimization: ort.GraphOptimizationLevel
) -> ort.SessionOptions:
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = num_threads or len(os.sched_getaffinity(0))
    settings.inter_op_num_threads = 1
    settings.graph_optimization_level = optimization
    settings.log_severity_level = 3
    return settings


def _opened(
    model: Path, settings: ort.SessionOptions, providers: list[str | tuple[str, dict[str, str]]]
) -> ort.InferenceSession:
    try:
        return ort.InferenceSession(str(model), settings, providers=providers)
    except Exception as error:
        raise BackendError(
            f"ONNX Runtime {ort.__version__} cannot load {model}: {error}"
        ) from error
