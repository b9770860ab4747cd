"""A loaded TensorRT engine: contexts, device memory, and steps on one stream."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from octavo.backends import cuda_devices
from octavo.backends.base import AcceptInputs, Int32Array, StepInputs, StepOutputs
from octavo.backends.step_checks import no_acceptance_graph
from octavo.backends.tensorrt.contexts import Context, EngineContexts
from octavo.backends.tensorrt.cuda_runtime import CudaRuntime
from octavo.backends.tensorrt.decode_graphs import DecodeGraphs
from octavo.backends.tensorrt.engine_kernels import EngineKernels
from octavo.backends.tensorrt.memory_checks import check_memory
from octavo.backends.tensorrt.step_buffers import DeviceMemory, StepBuffers
from octavo.backends.tensorrt.step_shapes import (
    Shape,
    choose_profile,
    largest,
    max_cache_blocks,
    padded_width,
    resolve,
)
from octavo.graphs import bindings
from octavo.graphs.bindings import Binding
from octavo.graphs.errors import BackendError
from octavo.graphs.spec import DTYPE_BYTES

if TYPE_CHECKING:
    from octavo.backends.manifest import Manifest
    from octavo.backends.tensorrt.flavour import Flavour

_DIMS = (
    bindings.TOKENS,
    bindings.SEQUENCES,
    bindings.SEQUENCES_PLUS_ONE,
    bindings.BLOCKS_PER_SEQUENCE,
    bindings.LOGITS_ROWS,
)


class TensorRtExecutable:
    """Inputs go to the device and outputs come back within a step; the caches stay there."""

    def __init__(
        self,
        manifest: Manifest,
        cuda: CudaRuntime,
        kernels: EngineKernels,
        engine: EngineContexts,
    ) -> None:
        self._manifest, self._cuda, self._kernels = manifest, cuda, kernels
        self._engine: EngineContexts | None = engine
        self._caches = tuple(
            manifest.spec.kv_cache_bindings(manifest.limits.block_size, manifest.kv_cache_dtype)
        )
        names = {cache.name for cache in self._caches}
        self._inputs = [one for one in manifest.inputs if one.name not in names]
        self._outputs = manifest.spec.output_bindings
        self._max_width = largest(manifest.profiles, bindings.BLOCKS_PER_SEQUENCE)
        self._num_blocks = 0
        self._cache_addresses: list[int] = []
        self._cache_memory, self._work_memory = DeviceMemory(cuda), DeviceMemory(cuda)
        self._buffers = StepBuffers(cuda)
        self._graphs = DecodeGraphs(cuda)
        self._contexts: list[Context] = []
        try:
            self._addresses = self._allocate_steps()
            (self._work,) = self._work_memory.allocate([engine.memory_bytes], zeroed=False)
            for index in range(engine.num_profiles):
                self._contexts.append(engine.make(index, self._work, cuda.stream))
        except BaseException:
            self.close()
            raise

    @classmethod
    def load(cls, bundle: Path, manifest: Manifest, flavour: Flavour) -> TensorRtExecutable:
        """Needs neither torch nor Triton: the kernels lie compiled in the bundle."""
        trt = flavour.load()
        model = bundle / str(manifest.backend_data["model"])
        if not model.is_file():
            raise BackendError(f"{model} is missing: copy or build the engine again")
        capability = _capability()
        cuda = CudaRuntime()
        try:
            kernels = EngineKernels(bundle, manifest, capability)
            engine = EngineContexts(trt, flavour, model, kernels)
            if engine.num_profiles != len(manifest.profiles):
                raise BackendError(
                    f"{model} has {engine.num_profiles} profiles and the manifest names "
                    f"{len(manifest.profiles)}: copy or build the engine again"
                )
        except BaseException:
            cuda.close()
            raise
        return cls(manifest, cuda, kernels, engine)

    def allocate_kv_cache(self, num_blocks: int) -> None:
        self._require_open()
        most = max_cache_blocks(self._caches)
        if not 1 <= num_blocks <= most:
            raise BackendError(
                f"a cache of {num_blocks} blocks was asked for and the engine takes 1 to {most}: "
                "give the cache less memory"
            )
        self._free_caches()  # before the new ones are made
        shapes = {one.name: (num_blocks, *map(int, one.shape[1:])) for one in self._caches}
        sizes = [math.prod(shapes[c.name]) * DTYPE_BYTES[c.dtype] for c in self._caches]
        self._cache_addresses = self._cache_memory.allocate(sizes, zeroed=True)
        self._cuda.synchronize()
        self._num_blocks = num_blocks
        self._cache_shapes = shapes
        self._cache_blocks = [size // num_blocks for size in sizes]  # bytes

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        self._require_cache()
        # One stream: in the order of the copies, and before the steps to come.
        for address, size in zip(self._cache_addresses, self._cache_blocks, strict=True):
            for source, destination in copies:
                self._cuda.copy_on_device(
                    address + destination * size, address + source * size, size
                )

    def run(self, inputs: StepInputs) -> StepOutputs:
        self._require_cache()
        arrays = {one.name: getattr(inputs, one.name) for one in self._inputs}
        sizes = self._sizes(arrays)
        if self._caches:
            check_memory(inputs, self._manifest, self._num_blocks)
        is_decode = bool(self._caches) and sizes[bindings.TOKENS] == sizes[bindings.SEQUENCES]
        num_rows = sizes.get(bindings.LOGITS_ROWS, 0)
        padded = {name: max(1, size) for name, size in sizes.items()}
        if is_decode:
            width = sizes[bindings.BLOCKS_PER_SEQUENCE]
            padded[bindings.BLOCKS_PER_SEQUENCE] = padded_width(width, self._max_width)
        profile = choose_profile(self._manifest.profiles, padded)
        given = {one.name: resolve(one.shape, padded) for one in self._inputs}
        self._buffers.write(arrays, given)
        wanted = {one.name: self._output_shape(one, padded) for one in self._outputs}
        self._enqueue(profile, given, wanted, tuple(padded.values()) if is_decode else None)
        self._cuda.synchronize()
        results = {name: self._buffers.view(name, shape) for name, shape in wanted.items()}
        if self._caches and not num_rows:  # a row was computed for TensorRT's sake
            for one in self._outputs:
                if one.shape[0] == bindings.LOGITS_ROWS:
                    results[one.name] = results[one.name][:0]
        return StepOutputs(**results)

    def accept(self, inputs: AcceptInputs) -> Int32Array:
        raise no_acceptance_graph()

    def close(self) -> None:
        if self._engine is None:
            return
        self._free_caches()
        self._contexts.clear()
        self._engine.close()
        self._engine = None
        self._kernels.close()
        self._work_memory.close()
        self._buffers.close()
        self._cuda.close()

    def _enqueue(
        self,
        profile: int,
        given: dict[str, Shape],
        wanted: dict[str, Shape],
        key: tuple[int, ...] | None,
    ) -> None:
        if key is not None and self._graphs.launch(key):
            return
        enqueue = partial(self._enqueue_in, given=given, wanted=wanted)
        if key is not None and self._graphs.wants(key):
            assert self._engine is not None
            own = self._engine.make(profile, self._work, self._cuda.stream)
            self._graphs.record(key, self._ready(own, given), enqueue)
        else:
            enqueue(self._ready(self._contexts[profile], given))

    def _ready(self, context: Context, given: dict[str, Shape]) -> Context:
        context.set_addresses(self._addresses)
        for cache, address in zip(self._caches, self._cache_addresses, strict=True):
            shared = {cache.name: address, bindings.cache_output_name(cache.name): address}
            context.set_addresses(shared)
        context.set_shapes(given)
        if self._caches:
            context.set_shapes(self._cache_shapes)
        return context

    def _enqueue_in(
        self, context: Context, *, given: dict[str, Shape], wanted: dict[str, Shape]
    ) -> None:
        self._buffers.send(given)
        context.enqueue(self._cuda.stream)
        self._buffers.fetch(wanted)

    def _allocate_steps(self) -> dict[str, int]:
        """Device addresses of inputs and outputs, as large as any profile lets them be."""
        most = {name: largest(self._manifest.profiles, name) for name in _DIMS}
        addresses = {
            one.name: self._buffers.add(one.name, np.dtype(one.dtype), resolve(one.shape, most))
            for one in self._inputs
        }
        for one in self._outputs:
            shape = self._output_shape(one, most)
            addresses[one.name] = self._buffers.add(one.name, np.dtype(one.dtype), shape)
        return addresses

    def _sizes(self, arrays: dict[str, NDArray[Any]]) -> dict[str, int]:
        """Of the symbolic dimensions; BackendError where two arrays disagree."""
        sizes: dict[str, int] = {}
        for one in self._inputs:
            array = arrays[one.name]
            if array is None or array.dtype != one.dtype or array.ndim != len(one.shape):
                raise BackendError(
                    f"{one.name} is not an array {one.dtype} {list(one.shape)}, as the engine "
                    "takes it"
                )
            for name, size in zip(one.shape, array.shape, strict=True):
                wanted = name if isinstance(name, int) else sizes.setdefault(name, size)
                if size != wanted:
                    raise BackendError(
                        f"{one.name} has shape {array.shape}, its dimension {name} should be "
                        f"{wanted}"
                    )
        if bindings.SEQUENCES in sizes:
            starts = sizes.get(bindings.SEQUENCES_PLUS_ONE, sizes[bindings.SEQUENCES] + 1)
            if starts != sizes[bindings.SEQUENCES] + 1:
                raise BackendError(
                    f"query_start_loc has {starts} elements for {sizes[bindings.SEQUENCES]} "
                    "sequences, it must have one more"
                )
        return sizes

    def _output_shape(self, output: Binding, sizes: dict[str, int]) -> Shape:
        columns = int(output.shape[1])
        if not self._caches:  # a drafter of heads: every token has `drafts_per_row` rows
            return sizes[bindings.TOKENS] * self._manifest.spec.drafts_per_row, columns
        return sizes[str(output.shape[0])], columns

    def _require_open(self) -> None:
        if self._engine is None:
            raise BackendError("the engine is closed: load it again")

    def _require_cache(self) -> None:
        if self._engine is None or len(self._cache_addresses) < len(self._caches):
            raise BackendError("the engine is closed or has no cache: call allocate_kv_cache first")

    def _free_caches(self) -> None:
        self._graphs.clear()
        self._cache_memory.close()
        self._cache_addresses = []
        self._num_blocks = 0


def _capability() -> str:
    found = cuda_devices.compute_capabilities()
    if not found:
        raise BackendError(
            "no CUDA device is visible here: run the engine on a machine with an NVIDIA GPU and "
            "its driver"
        )
    return found[0]
