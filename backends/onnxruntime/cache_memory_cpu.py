"""Caches in host memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnxruntime as ort

from octavo.backends.host_caches import HostCaches
from octavo.backends.onnxruntime.sessions import bind_array
from octavo.graphs import bindings
from octavo.graphs.bindings import Binding


class HostCacheMemory:
    """`layers` are the spec's bindings, whose inputs and outputs the graph has by name."""

    def __init__(self, layers: Iterable[Binding]) -> None:
        self._caches = HostCaches(layers)

    @property
    def num_blocks(self) -> int:
        return self._caches.num_blocks

    def allocate(self, num_blocks: int, binding: ort.IOBinding) -> None:
        self._caches.allocate(num_blocks)
        for layer, array in zip(self._caches.declared, self._caches.arrays, strict=True):
            bind_array(binding.bind_input, layer.name, array)
            bind_array(binding.bind_output, bindings.cache_output_name(layer.name), array)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        self._caches.copy_blocks(copies)

    def free(self) -> None:
        self._caches.free()
