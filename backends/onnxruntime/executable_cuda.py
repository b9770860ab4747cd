"""A loaded ONNX Runtime engine on CUDA: weights and caches stay on the device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from octavo.backends.base import LoadOptions, StepInputs
from octavo.backends.onnxruntime import sessions
from octavo.backends.onnxruntime.cache_memory_device import DeviceCaches
from octavo.backends.onnxruntime.executable import OnnxRuntimeExecutable
from octavo.backends.onnxruntime.files import COPY_BLOCKS_FILE
from octavo.backends.onnxruntime.split_layout import ATTENTION_METADATA, split_caches
from octavo.backends.step_checks import check_step

if TYPE_CHECKING:
    from octavo.backends.manifest import Manifest

DEVICE = ("cuda", sessions.CUDA_DEVICE_ID)


class CudaExecutable(OnnxRuntimeExecutable):
    """ONNX Runtime copies a step's arrays to the device when they are bound, so they are bound in
    every step; what it returns it copies into host memory at the end of one.
    """

    def __init__(self, model: Path, manifest: Manifest, options: LoadOptions) -> None:
        session = sessions.open_on_cuda(model, options.num_threads)
        limits, dtype = manifest.limits, manifest.kv_cache_dtype
        caches = DeviceCaches(
            tuple(split_caches(manifest.spec, limits.block_size, dtype)),
            DEVICE,
            lambda: sessions.open_on_cuda(model.parent / COPY_BLOCKS_FILE, options.num_threads),
        )
        super().__init__(model, manifest, session, caches)
        self._takes_metadata = ATTENTION_METADATA in {one.name for one in session.get_inputs()}
        self._metadata = np.zeros(3, np.int32)  # read in host memory while a step runs

    def _check(self, inputs: StepInputs) -> None:
        """The kernels of ONNX Runtime follow block tables and slots wherever they lead."""
        if self._cache_bindings:
            check_step(inputs, self._manifest, self._caches.num_blocks)

    def _prepare(self, inputs: StepInputs) -> None:
        self._bind(inputs)

    def _arrays(self, inputs: StepInputs) -> Iterator[tuple[str, NDArray[Any]]]:
        yield from super()._arrays(inputs)
        if self._takes_metadata:
            self._metadata[:] = attention_metadata(inputs)
            yield ATTENTION_METADATA, self._metadata


def attention_metadata(inputs: StepInputs) -> tuple[int, int, int]:
    """The most new tokens of a sequence, the longest sequence as upper and as lower bound."""
    counts = np.diff(inputs.query_start_loc)
    longest = int((inputs.prefix_offsets + counts).max())
    return int(counts.max()), longest, longest
