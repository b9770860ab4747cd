"""Caches in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from octavo.backends.page_in import PageIn
from octavo.graphs import bindings
from octavo.graphs.bindings import Binding


class HostCaches:
    """`layers` are the spec's bindings, whose inputs and outputs the graph has by name."""

    def __init__(self, layers: Sequence[Binding]) -> None:
        self._layers = tuple(layers)
        self._caches: list[ort.OrtValue] = []
        self._arrays: list[NDArray[Any]] = []  # the memory of `_caches`
        self._page_in: PageIn | None = None

    @property
    def num_blocks(self) -> int:
        return len(self._arrays[0]) if self._arrays else 0

    def allocate(self, num_blocks: int, binding: ort.IOBinding) -> None:
        for layer in self._layers:
            sizes = [int(size) for size in layer.shape[1:]]
            array = np.zeros((num_blocks, *sizes), np.dtype(layer.dtype))
            cache = ort.OrtValue.ortvalue_from_numpy(array)
            binding.bind_ortvalue_input(layer.name, cache)
            binding.bind_ortvalue_output(bindings.cache_output_name(layer.name), cache)
            self._caches.append(cache)
            self._arrays.append(array)
        self._page_in = PageIn(self._arrays)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        for array in self._arrays:
            for source, destination in copies:
                array[destination] = array[source]

    def free(self) -> None:
        if self._page_in is not None:
            self._page_in.stop()
            self._page_in = None
        self._caches.clear()
        self._arrays.clear()
