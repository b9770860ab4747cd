"""A loaded torch engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from octavo.backends.base import LoadOptions, StepInputs, StepOutputs
from octavo.backends.step_checks import check_step
from octavo.backends.torch import archive
from octavo.graphs.errors import BackendError

if TYPE_CHECKING:
    from octavo.backends.manifest import Manifest

_INPUT_NAMES = tuple(field.name for field in fields(StepInputs))


class TorchExecutable:
    def __init__(self, model: Path, manifest: Manifest, options: LoadOptions) -> None:
        if options.num_threads is not None:
            torch.set_num_threads(options.num_threads)
        self._manifest = manifest
        self._module: Callable[..., Any] | None = archive.load(model)
        self._caches: list[Tensor] = []

    def allocate_kv_cache(self, num_blocks: int) -> None:
        if self._module is None:
            raise BackendError("the engine is closed: load it again")
        self._caches.clear()
        layers = self._manifest.spec.kv_cache_bindings(
            self._manifest.limits.block_size, self._manifest.kv_cache_dtype
        )
        self._caches += [
            torch.zeros(
                num_blocks,
                *(int(size) for size in layer.shape[1:]),
                dtype=getattr(torch, layer.dtype),
            )
            for layer in layers
        ]

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        if not self._caches:
            raise BackendError("the engine is closed or has no cache: call allocate_kv_cache first")
        for cache in self._caches:
            for source, destination in copies:
                cache[destination] = cache[source]

    @torch.no_grad()
    def run(self, inputs: StepInputs) -> StepOutputs:
        if self._module is None or not self._caches:
            raise BackendError("the engine is closed or has no cache: call allocate_kv_cache first")
        check_step(inputs, self._manifest, len(self._caches[0]))
        arrays = [torch.from_numpy(getattr(inputs, name)) for name in _INPUT_NAMES]
        try:
            logits, self._caches = self._module(*arrays, self._caches)
        except (RuntimeError, IndexError) as error:
            raise BackendError(f"PyTorch failed in a step: {error}") from error
        return StepOutputs(logits.numpy())

    def close(self) -> None:
        self._caches.clear()
        self._module = None
