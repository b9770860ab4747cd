"""`cuda.bindings.runtime` in host memory: a stream that runs only when it is waited for.

Every copy is checked against the live allocations, so whatever leaves its memory is an error here
as it would be on a GPU with a checker.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from enum import Enum, IntEnum
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

Operation = Callable[[], None]
TOTAL_BYTES = 1 << 32


CudaError = IntEnum(
    "CudaError",
    {
        "cudaSuccess": 0,
        "cudaErrorInvalidValue": 1,
        "cudaErrorMemoryAllocation": 2,
        "cudaErrorIllegalAddress": 700,
    },
)
MemcpyKind = Enum(
    "MemcpyKind", "cudaMemcpyHostToDevice cudaMemcpyDeviceToHost cudaMemcpyDeviceToDevice"
)
CaptureMode = Enum("CaptureMode", "cudaStreamCaptureModeThreadLocal")
SUCCESS = CudaError.cudaSuccess
_CALLS = (
    "set_device",
    "mem_get_info",
    "malloc",
    "malloc_host",
    "free",
    "free_host",
    "memset_async",
    "memcpy_async",
    "stream_create_with_flags",
    "stream_destroy",
    "stream_synchronize",
    "stream_begin_capture",
    "stream_end_capture",
    "graph_instantiate",
    "graph_destroy",
    "graph_launch",
    "graph_exec_destroy",
    "get_error_string",
)


class FakeCuda:
    """The state behind the module: memory, one stream, graphs, and the calls that were made."""

    def __init__(self) -> None:
        self.device: dict[int, NDArray[np.uint8]] = {}
        self.host: dict[int, NDArray[np.uint8]] = {}
        self.graphs: dict[int, list[Operation]] = {}
        self.calls: list[str] = []
        self.fails: dict[str, CudaError] = {}  # the next call of that name
        self.pending: list[Operation] = []
        self.recording: list[Operation] | None = None
        self.streams = 0
        self._next_graph = 1

    # --- for the other fakes ----------------------------------------------------------------------

    def enqueue(self, operation: Operation) -> None:
        (self.pending if self.recording is None else self.recording).append(operation)

    def view(self, address: int, num_bytes: int) -> NDArray[np.uint8]:
        """Memory that an allocation of the device or the host covers; KeyError if none does."""
        for memory in (*self.device.values(), *self.host.values()):
            offset = address - memory.ctypes.data
            if offset >= 0 and offset + num_bytes <= memory.size:
                return memory[offset : offset + num_bytes]
        raise KeyError(f"{num_bytes} bytes at {address} are nobody's")

    def module(self) -> ModuleType:
        module = ModuleType("cuda.bindings.runtime")
        for call in _CALLS:
            name = "cuda" + "".join(word.capitalize() for word in call.split("_"))
            setattr(module, name, self._recorded(name, getattr(self, call)))
        vars(module).update(
            cudaError_t=CudaError,
            cudaMemcpyKind=MemcpyKind,
            cudaStreamCaptureMode=CaptureMode,
            cudaStreamNonBlocking=1,
        )
        return module

    def _recorded(self, name: str, function: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append(name)
            if name in self.fails:
                error = self.fails.pop(name)
                return (error, None) if name in ("cudaMalloc", "cudaMallocHost") else (error,)
            result: tuple[Any, ...] = function(*arguments)
            return result

        return call

    # --- the runtime ------------------------------------------------------------------------------

    def set_device(self, device: int) -> tuple[Any, ...]:
        return (SUCCESS,)

    def mem_get_info(self) -> tuple[Any, ...]:
        used = sum(memory.size for memory in self.device.values())
        return SUCCESS, TOTAL_BYTES - used, TOTAL_BYTES

    def malloc(self, size: int) -> tuple[Any, ...]:
        if self.recording is not None:
            return CudaError.cudaErrorInvalidValue, None
        return SUCCESS, _allocate(self.device, size)

    def malloc_host(self, size: int) -> tuple[Any, ...]:
        return SUCCESS, _allocate(self.host, size)

    def free(self, address: int) -> tuple[Any, ...]:
        if address == 0:
            return (SUCCESS,)
        return (_free(self.device, address),)

    def free_host(self, address: int) -> tuple[Any, ...]:
        return (_free(self.host, address),)

    def memset_async(self, address: int, value: int, size: int, stream: int) -> tuple[Any, ...]:
        self.enqueue(lambda: self.view(address, size).fill(value))
        return (SUCCESS,)

    def memcpy_async(
        self, to: int, source: int, size: int, kind: MemcpyKind, stream: int
    ) -> tuple[Any, ...]:
        memory = {"Host": self.host, "Device": self.device}
        source_place, _, to_place = kind.name.removeprefix("cudaMemcpy").partition("To")
        if not (
            _covers(memory[source_place], source, size) and _covers(memory[to_place], to, size)
        ):
            return (CudaError.cudaErrorInvalidValue,)
        self.enqueue(lambda: _discard(ctypes.memmove(to, source, size)))
        return (SUCCESS,)

    def stream_create_with_flags(self, flags: int) -> tuple[Any, ...]:
        self.streams += 1
        return SUCCESS, 7

    def stream_destroy(self, stream: int) -> tuple[Any, ...]:
        self.streams -= 1
        return (SUCCESS,)

    def stream_synchronize(self, stream: int) -> tuple[Any, ...]:
        while self.pending:
            try:
                self.pending.pop(0)()
            except KeyError:
                return (CudaError.cudaErrorIllegalAddress,)
        return (SUCCESS,)

    def stream_begin_capture(self, stream: int, mode: CaptureMode) -> tuple[Any, ...]:
        self.recording = []
        return (SUCCESS,)

    def stream_end_capture(self, stream: int) -> tuple[Any, ...]:
        recorded, self.recording = self.recording, None
        return SUCCESS, recorded

    def graph_instantiate(self, recorded: list[Operation], flags: int) -> tuple[Any, ...]:
        number, self._next_graph = self._next_graph, self._next_graph + 1
        self.graphs[number] = recorded
        return SUCCESS, number

    def graph_destroy(self, recorded: list[Operation]) -> tuple[Any, ...]:
        return (SUCCESS,)

    def graph_launch(self, graph: int, stream: int) -> tuple[Any, ...]:
        for operation in self.graphs[graph]:
            self.enqueue(operation)
        return (SUCCESS,)

    def graph_exec_destroy(self, graph: int) -> tuple[Any, ...]:
        del self.graphs[graph]
        return (SUCCESS,)

    def get_error_string(self, error: CudaError) -> tuple[Any, ...]:
        return SUCCESS, error.name.encode()


def install(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Puts a fake where cuda-python is imported from."""
    fake = FakeCuda()
    module = fake.module()
    parent, bindings = ModuleType("cuda"), ModuleType("cuda.bindings")
    vars(parent).update(bindings=bindings, __path__=[])
    vars(bindings).update(runtime=module, __path__=[])
    for part in (parent, bindings, module):
        part.__spec__ = ModuleSpec(part.__name__, None)
        monkeypatch.setitem(sys.modules, part.__name__, part)
    return fake


def _allocate(memory: dict[int, NDArray[np.uint8]], size: int) -> int:
    made = np.full(size, 0xAB, np.uint8)  # whatever lay there before
    memory[made.ctypes.data] = made
    return made.ctypes.data


def _free(memory: dict[int, NDArray[np.uint8]], address: int) -> CudaError:
    known = memory.pop(address, None)
    return CudaError.cudaErrorInvalidValue if known is None else CudaError.cudaSuccess


def _covers(memory: dict[int, NDArray[np.uint8]], address: int, size: int) -> bool:
    return any(base <= address and address + size <= base + m.size for base, m in memory.items())


def _discard(_: object) -> None:
    """For operations whose result nobody wants."""
