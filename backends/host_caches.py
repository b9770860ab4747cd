"""The paged caches of an engine that computes on the CPU, as arrays of numpy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.backends.page_in import PageIn
from octavo.graphs.bindings import Binding
from octavo.graphs.errors import BackendError


class HostCaches:
    """One array for each binding, zeroed; their pages are fetched while the engine starts."""

    def __init__(self, declared: Iterable[Binding]) -> None:
        self.declared = tuple(declared)
        self.arrays: list[NDArray[Any]] = []
        self._page_in: PageIn | None = None

    @property
    def num_blocks(self) -> int:
        return len(self.arrays[0]) if self.arrays else 0

    @property
    def ready(self) -> bool:
        return len(self.arrays) == len(self.declared)

    def allocate(self, num_blocks: int) -> None:
        self.free()  # before the new ones are made
        for binding in self.declared:
            sizes = [int(size) for size in binding.shape[1:]]
            self.arrays.append(np.zeros((num_blocks, *sizes), np.dtype(binding.dtype)))
        self._page_in = PageIn(self.arrays)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        if not self.arrays:
            raise no_cache()
        for array in self.arrays:
            for source, destination in copies:
                array[destination] = array[source]

    def free(self) -> None:
        """Harmless when called twice."""
        if self._page_in is not None:
            self._page_in.stop()
            self._page_in = None
        self.arrays.clear()


def no_cache() -> BackendError:
    return BackendError("the engine is closed or has no cache: call allocate_kv_cache first")
