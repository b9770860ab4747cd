"""Memory of a step's inputs and outputs: allocated once, as large as the engine's limits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.backends.tensorrt.cuda_runtime import CudaRuntime, host_array
from octavo.backends.tensorrt.step_shapes import Shape


@dataclass(frozen=True)
class Buffer:
    """The same on the device and, pinned, on the host."""

    device: int
    host: int
    memory: NDArray[np.uint8]  # of the host
    dtype: np.dtype[Any]

    def view(self, shape: Shape) -> NDArray[Any]:
        """The first elements on the host, in a shape."""
        size = math.prod(shape)
        return self.memory[: size * self.dtype.itemsize].view(self.dtype).reshape(shape)


class StepBuffers:
    """Inputs and outputs by name."""

    def __init__(self, cuda: CudaRuntime) -> None:
        self._cuda = cuda
        self._buffers: dict[str, Buffer] = {}

    def add(self, name: str, dtype: np.dtype[Any], largest: Shape) -> int:
        """Allocates a tensor of at most the shape `largest`; returns its device address."""
        num_bytes = math.prod(largest) * dtype.itemsize
        device = self._cuda.allocate(num_bytes)
        try:
            host = self._cuda.allocate_host(num_bytes)
        except BaseException:
            self._cuda.free(device)
            raise
        self._buffers[name] = Buffer(device, host, host_array(host, num_bytes), dtype)
        return device

    def write(self, arrays: Mapping[str, NDArray[Any]], shapes: Mapping[str, Shape]) -> None:
        """Copies inputs to the host side; an array narrower than its shape is filled with zeros."""
        for name, array in arrays.items():
            view = self._buffers[name].view(shapes[name])
            if array.shape == view.shape:
                view[...] = array
            else:
                view[...] = 0
                view[tuple(slice(size) for size in array.shape)] = array

    def send(self, shapes: Mapping[str, Shape]) -> None:
        """Enqueues copies of the inputs to the device."""
        for name, shape in shapes.items():
            buffer = self._buffers[name]
            size = math.prod(shape) * buffer.dtype.itemsize
            self._cuda.copy_to_device(buffer.device, buffer.host, size)

    def fetch(self, shapes: Mapping[str, Shape]) -> None:
        """Enqueues copies of the outputs to the host."""
        for name, shape in shapes.items():
            buffer = self._buffers[name]
            size = math.prod(shape) * buffer.dtype.itemsize
            self._cuda.copy_to_host(buffer.host, buffer.device, size)

    def view(self, name: str, shape: Shape) -> NDArray[Any]:
        return self._buffers[name].view(shape)

    def close(self) -> None:
        for name in list(self._buffers):
            buffer = self._buffers.pop(name)
            self._cuda.free(buffer.device)
            self._cuda.free_host(buffer.host)


class DeviceMemory:
    """Device memory that is freed together: the caches, or what layers compute in."""

    def __init__(self, cuda: CudaRuntime) -> None:
        self._cuda = cuda
        self._addresses: list[int] = []

    def allocate(self, sizes: Iterable[int], *, zeroed: bool) -> list[int]:
        """Addresses of new memory, of `sizes` bytes each; nothing stays if one cannot be had."""
        made: list[int] = []
        try:
            for size in sizes:
                made.append(self._cuda.allocate(size))
                if zeroed:
                    self._cuda.zero(made[-1], size)
        except BaseException:
            for address in made:
                self._cuda.free(address)
            raise
        self._addresses += made
        return made

    def close(self) -> None:
        while self._addresses:
            self._cuda.free(self._addresses.pop())
