"""The caches of an engine, in the memory of its device, bound in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import onnxruntime as ort


class CacheMemory(Protocol):
    @property
    def num_blocks(self) -> int:
        """Of every cache; 0 before `allocate` and after `free`."""

    def allocate(self, num_blocks: int, binding: ort.IOBinding) -> None:
        """Makes zeroed caches and binds each as an input and an output of one buffer."""

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies blocks of every cache, (source, destination) by (source, destination)."""

    def free(self) -> None:
        """Gives the memory back, once nothing is bound to it; harmless when called twice."""
