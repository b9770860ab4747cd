"""A loaded ONNX Runtime engine: one session whose caches are bound in place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from octavo.backends.base import (
    AcceptInputs,
    Float32Array,
    Int32Array,
    StepInputs,
    StepOutputs,
)
from octavo.backends.host_caches import no_cache
from octavo.backends.onnxruntime.sessions import bind_array, open_on_cpu
from octavo.backends.step_checks import no_acceptance_graph
from octavo.graphs import bindings
from octavo.graphs.bindings import Binding
from octavo.graphs.errors import BackendError
from octavo.graphs.ops.accept import SCHEMA as ACCEPT

if TYPE_CHECKING:
    from octavo.backends.manifest import Manifest
    from octavo.backends.onnxruntime.cache_memory import CacheMemory


class OnnxRuntimeExecutable:
    """What engines on every device share: steps come from host memory and go back to it.

    Logits are written to one buffer that is used again.
    """

    def __init__(
        self, model: Path, manifest: Manifest, session: ort.InferenceSession, caches: CacheMemory
    ) -> None:
        self._manifest = manifest
        self._bundle = model.parent
        self._session: ort.InferenceSession | None = session
        self._binding = session.io_binding()
        self._caches = caches
        self._accept: ort.InferenceSession | None = None  # until it is needed
        layers = manifest.spec.kv_cache_bindings(
            manifest.limits.block_size, manifest.kv_cache_dtype
        )
        self._cache_bindings = tuple(layers)
        names = {binding.name for binding in self._cache_bindings}
        self._input_names = [one.name for one in manifest.inputs if one.name not in names]
        self._buffers = {
            binding.name: np.empty((0, int(binding.shape[1])), np.float32)
            for binding in manifest.spec.output_bindings
        }
        self._bound: StepInputs | None = None
        self._outputs = StepOutputs(self._buffers[bindings.LOGITS_NAME])

    def allocate_kv_cache(self, num_blocks: int) -> None:
        if self._session is None:
            raise BackendError("the engine is closed: load it again")
        self._free_caches()  # before the new ones are made
        self._caches.allocate(num_blocks, self._binding)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        if not self._caches.num_blocks:
            raise no_cache()
        self._caches.copy_blocks(copies)

    def run(self, inputs: StepInputs) -> StepOutputs:
        if self._session is None or (self._cache_bindings and not self._caches.num_blocks):
            raise no_cache()
        self._check(inputs)
        try:
            self._prepare(inputs)
            self._session.run_with_iobinding(self._binding)
        except Exception as error:
            raise BackendError(f"ONNX Runtime failed in a step: {error}") from error
        return self._outputs

    def accept(self, inputs: AcceptInputs) -> Int32Array:
        if self._accept is None:
            name = self._manifest.accept_file
            if name is None:
                raise no_acceptance_graph()
            # One node on one thread: a second pool would spin against the first.
            self._accept = open_on_cpu(self._bundle / name, num_threads=1)
        operands = {one.name: getattr(inputs, one.name) for one in ACCEPT.inputs}
        try:
            (tokens,) = self._accept.run(None, operands)
        except Exception as error:
            raise BackendError(f"ONNX Runtime failed in acceptance: {error}") from error
        found: Int32Array = tokens
        return found

    def close(self) -> None:
        self._free_caches()
        self._session = self._accept = None

    def _check(self, inputs: StepInputs) -> None:
        """Raises BackendError for a step that the device would read or write out of bounds in."""

    def _prepare(self, inputs: StepInputs) -> None:
        """Binds the memory that a step reads and writes."""
        raise NotImplementedError

    def _arrays(self, inputs: StepInputs) -> Iterator[tuple[str, NDArray[Any]]]:
        """The graph's inputs by name, but for the caches."""
        for name in self._input_names:
            yield name, getattr(inputs, name)

    def _bind(self, inputs: StepInputs) -> None:
        """Binds the step's memory. The object is kept, so it tells that nothing else is bound."""
        self._bound = None
        for name, array in self._arrays(inputs):
            bind_array(self._binding.bind_input, name, array)
        outputs = {
            binding.name: self._buffer(binding.name, self._num_rows(binding, inputs))
            for binding in self._manifest.spec.output_bindings
        }
        for name, array in outputs.items():
            bind_array(self._binding.bind_output, name, array)
        self._outputs = StepOutputs(**outputs)
        self._bound = inputs

    def _free_caches(self) -> None:
        self._binding.clear_binding_inputs()
        self._binding.clear_binding_outputs()
        self._bound = None
        self._caches.free()

    def _num_rows(self, binding: Binding, inputs: StepInputs) -> int:
        num_tokens = len(inputs.token_ids)
        if not self._cache_bindings:  # a drafter of heads: every token has `drafts_per_row` rows
            return num_tokens * self._manifest.spec.drafts_per_row
        return num_tokens if binding.shape[0] == bindings.TOKENS else len(inputs.logits_indices)

    def _buffer(self, name: str, num_rows: int) -> Float32Array:
        if num_rows > len(self._buffers[name]):
            self._buffers[name] = np.empty((num_rows, self._buffers[name].shape[1]), np.float32)
        return self._buffers[name][:num_rows]
