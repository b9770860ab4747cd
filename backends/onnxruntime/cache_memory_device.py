"""Caches in device memory, which only ONNX Runtime reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnxruntime as ort

from octavo.backends.block_origins import block_origins
from octavo.backends.onnxruntime.split_layout import COPY_DESTINATIONS, COPY_SOURCES, SplitCache
from octavo.graphs.errors import BackendError

# What bindings call the 16-bit floats: numpy has no bfloat16.
_ELEMENT_TYPES = {"float16": 10, "bfloat16": 16}  # of onnx.TensorProto


class DeviceCaches:
    """`device` is what ONNX Runtime calls it; `open_copies` opens the graph that copies blocks."""

    def __init__(
        self,
        caches: Sequence[SplitCache],
        device: tuple[str, int],
        open_copies: Callable[[], ort.InferenceSession],
    ) -> None:
        self._layout = tuple(caches)
        self._device = device
        self._open_copies = open_copies
        self._memory: list[ort.OrtValue] = []
        self._copies: tuple[ort.InferenceSession, ort.IOBinding] | None = None  # until needed
        self._num_blocks = 0

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    def allocate(self, num_blocks: int, binding: ort.IOBinding) -> None:
        for cache in self._layout:
            # Zeros of both 16-bit floats are the same bytes.
            zeros = np.zeros((num_blocks, *cache.block_shape), np.float16)
            self._memory.append(ort.OrtValue.ortvalue_from_numpy(zeros, *self._device))
        self._num_blocks = num_blocks if self._memory else 0
        self._bind(binding)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        origins = block_origins(copies)
        if not origins:
            return
        sources = np.fromiter(origins.values(), np.int64, len(origins))
        destinations = np.fromiter(origins, np.int64, len(origins))
        self._check(sources, destinations)
        session, binding = self._copy_session()
        try:
            binding.bind_cpu_input(COPY_SOURCES, sources)
            binding.bind_cpu_input(COPY_DESTINATIONS, destinations[:, None])
            session.run_with_iobinding(binding)
        except Exception as error:
            raise BackendError(f"ONNX Runtime failed to copy blocks: {error}") from error

    def free(self) -> None:
        self._copies = None
        self._memory.clear()
        self._num_blocks = 0

    def _check(self, *blocks: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        """ONNX Runtime does not tell when it reads or writes outside a cache."""
        for named in blocks:
            if named.min() < 0 or named.max() >= self._num_blocks:
                raise BackendError(
                    f"blocks {named.tolist()} are to be copied in a cache of {self._num_blocks}: "
                    "name blocks of the cache"
                )

    def _copy_session(self) -> tuple[ort.InferenceSession, ort.IOBinding]:
        if self._copies is None:
            session = self._open_copies()
            binding = session.io_binding()
            self._bind(binding)
            self._copies = session, binding
        return self._copies

    def _bind(self, binding: ort.IOBinding) -> None:
        """By address: memory made of float16 may be one of bfloat16 to the graph."""
        for cache, memory in zip(self._layout, self._memory, strict=True):
            element_type = _ELEMENT_TYPES[cache.dtype]
            shape = (self._num_blocks, *cache.block_shape)
            place = (*self._device, element_type, shape, memory.data_ptr())
            binding.bind_input(cache.name, *place)
            binding.bind_output(cache.output_name, *place)
