"""What the benchmarks of single kernels share: ONNX Runtime sessions, aligned arrays, a clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from octavo.backends import kernels

ALIGNMENT = 64  # bytes of a cache line, as engines align their weights and caches


def open_session(model: bytes, threads: int) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.register_custom_ops_library(str(kernels.library_path()))
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def aligned(array: NDArray[Any]) -> NDArray[Any]:
    """A copy on a cache line's boundary."""
    room = np.empty(array.nbytes + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    copy = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def seconds_of(function: Callable[[], object], runs: int) -> list[float]:
    seconds = []
    for _ in range(runs):
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
    return seconds
