"""The calls of the CUDA runtime that an engine needs, with errors as sentences.

`cuda.bindings` is cuda-python's; it is imported when the first engine is loaded.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.graphs.errors import BackendError


class CudaRuntime:
    """One device, and one stream on which everything of an engine happens in order."""

    def __init__(self, device: int = 0) -> None:
        try:
            self._api: Any = importlib.import_module("cuda.bindings.runtime")
        except ImportError as error:
            raise BackendError(
                f"cuda-python cannot be imported ({error}): install cuda-bindings"
            ) from error
        kinds = self._api.cudaMemcpyKind
        self._to_device = kinds.cudaMemcpyHostToDevice
        self._to_host = kinds.cudaMemcpyDeviceToHost
        self._on_device = kinds.cudaMemcpyDeviceToDevice
        self._call("cudaSetDevice", device)
        self._call("cudaFree", 0)  # starts the device's context, which kernels are loaded into
        self._stream: Any = self._call("cudaStreamCreateWithFlags", self._api.cudaStreamNonBlocking)

    @property
    def stream(self) -> int:
        """The handle, as TensorRT and the kernels take it."""
        return int(self._stream)

    def allocate(self, num_bytes: int) -> int:
        """Device memory; BackendError with the free bytes where there is too little."""
        status, address = self._api.cudaMalloc(max(1, num_bytes))
        if status == self._api.cudaError_t.cudaErrorMemoryAllocation:
            free, total = self._call("cudaMemGetInfo")
            raise BackendError(
                f"the GPU has {free:,} of {total:,} bytes free and {num_bytes:,} more are needed: "
                "lower the cache's memory or build an engine with smaller limits"
            )
        self._check("cudaMalloc", status)
        return int(address)

    def free(self, address: int) -> None:
        self._call("cudaFree", address)

    def allocate_host(self, num_bytes: int) -> int:
        """Pinned memory of the host, which the device copies from and to by itself."""
        return int(self._call("cudaMallocHost", max(1, num_bytes)))

    def free_host(self, address: int) -> None:
        self._call("cudaFreeHost", address)

    def zero(self, address: int, num_bytes: int) -> None:
        self._call("cudaMemsetAsync", address, 0, num_bytes, self._stream)

    def copy_to_device(self, device: int, host: int, num_bytes: int) -> None:
        self._call("cudaMemcpyAsync", device, host, num_bytes, self._to_device, self._stream)

    def copy_to_host(self, host: int, device: int, num_bytes: int) -> None:
        self._call("cudaMemcpyAsync", host, device, num_bytes, self._to_host, self._stream)

    def copy_on_device(self, to: int, source: int, num_bytes: int) -> None:
        self._call("cudaMemcpyAsync", to, source, num_bytes, self._on_device, self._stream)

    def synchronize(self) -> None:
        """Waits for all that was enqueued; raises BackendError for what failed of it."""
        self._call("cudaStreamSynchronize", self._stream)

    @contextmanager
    def capture(self) -> Iterator[list[Any]]:
        """What is enqueued meanwhile is recorded, not run; the list then holds the one graph."""
        graphs: list[Any] = []
        # Other threads may allocate meanwhile: what they do is none of this graph's business.
        mode = self._api.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._call("cudaStreamBeginCapture", self._stream, mode)
        try:
            yield graphs
        except BaseException:
            # The stream must leave the capture; what ended it is raised, not its consequences.
            self._api.cudaStreamEndCapture(self._stream)
            raise
        recorded = self._call("cudaStreamEndCapture", self._stream)
        try:
            graphs.append(self._call("cudaGraphInstantiate", recorded, 0))
        finally:
            self._call("cudaGraphDestroy", recorded)

    def launch_graph(self, graph: Any) -> None:
        self._call("cudaGraphLaunch", graph, self._stream)

    def free_graph(self, graph: Any) -> None:
        self._call("cudaGraphExecDestroy", graph)

    def close(self) -> None:
        if self._stream is not None:
            stream, self._stream = self._stream, None
            self._call("cudaStreamDestroy", stream)

    def _call(self, name: str, *arguments: Any) -> Any:
        """The result of a call: one value, several, or None."""
        status, *results = getattr(self._api, name)(*arguments)
        self._check(name, status)
        return results[0] if len(results) == 1 else tuple(results) or None

    def _check(self, name: str, status: Any) -> None:
        if status == self._api.cudaError_t.cudaSuccess:
            return
        _, text = self._api.cudaGetErrorString(status)
        said = text.decode() if isinstance(text, bytes) else str(text)
        raise BackendError(
            f"CUDA failed in {name} (error {int(status)}, {said}): load the engine again"
        )


def host_array(address: int, num_bytes: int) -> NDArray[np.uint8]:
    """A view of host memory, u8 [num_bytes], that must outlive it."""
    memory = (ctypes.c_uint8 * num_bytes).from_address(address)
    array: NDArray[np.uint8] = np.ctypeslib.as_array(memory)
    return array
