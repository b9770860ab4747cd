"""A loaded torch engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from octavo.backends.base import (
    AcceptInputs,
    Int32Array,
    LoadOptions,
    StepInputs,
    StepOutputs,
)
from octavo.backends.step_checks import check_step, no_acceptance_graph
from octavo.backends.torch import archive
from octavo.graphs.errors import BackendError
from octavo.graphs.ops.accept import SCHEMA as ACCEPT

if TYPE_CHECKING:
    from octavo.backends.manifest import Manifest


class TorchExecutable:
    def __init__(self, model: Path, manifest: Manifest, options: LoadOptions) -> None:
        if options.num_threads is not None:
            torch.set_num_threads(options.num_threads)
        self._manifest = manifest
        self._bundle = model.parent
        self._module: Callable[..., Any] | None = archive.load(model)
        self._accept: Callable[..., Any] | None = None  # until it is needed
        self._caches: list[Tensor] = []
        caches = manifest.spec.kv_cache_bindings(
            manifest.limits.block_size, manifest.kv_cache_dtype
        )
        self._cache_bindings = tuple(caches)
        names = {binding.name for binding in self._cache_bindings}
        self._input_names = [one.name for one in manifest.inputs if one.name not in names]

    def allocate_kv_cache(self, num_blocks: int) -> None:
        if self._module is None:
            raise BackendError("the engine is closed: load it again")
        self._caches.clear()
        self._caches += [
            torch.zeros(
                num_blocks,
                *(int(size) for size in layer.shape[1:]),
                dtype=getattr(torch, layer.dtype),
            )
            for layer in self._cache_bindings
        ]

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        if not self._caches:
            raise BackendError("the engine is closed or has no cache: call allocate_kv_cache first")
        for cache in self._caches:
            for source, destination in copies:
                cache[destination] = cache[source]

    @torch.no_grad()
    def run(self, inputs: StepInputs) -> StepOutputs:
        if self._module is None or (self._cache_bindings and not self._caches):
            raise BackendError("the engine is closed or has no cache: call allocate_kv_cache first")
        arguments: list[Any] = [
            torch.from_numpy(getattr(inputs, name)) for name in self._input_names
        ]
        if self._caches:
            check_step(inputs, self._manifest, len(self._caches[0]))
            arguments.append(self._caches)
        try:
            outputs = self._module(*arguments)
        except (RuntimeError, IndexError) as error:
            raise BackendError(f"PyTorch failed in a step: {error}") from error
        if not self._caches:
            return StepOutputs(outputs.numpy())
        logits, *hidden_states, self._caches = outputs
        return StepOutputs(logits.numpy(), *(states.numpy() for states in hidden_states))

    @torch.no_grad()
    def accept(self, inputs: AcceptInputs) -> Int32Array:
        if self._accept is None:
            name = self._manifest.accept_file
            if name is None:
                raise no_acceptance_graph()
            self._accept = archive.load(self._bundle / name)
        operands = [torch.from_numpy(getattr(inputs, one.name)) for one in ACCEPT.inputs]
        tokens: Int32Array = self._accept(*operands).numpy()
        return tokens

    def close(self) -> None:
        self._accept = None
        self._caches.clear()
        self._module = None
