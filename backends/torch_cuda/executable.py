"""A loaded engine of PyTorch on CUDA: caches on the device, steps from the host and back to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from octavo.backends.base import (
    AcceptInputs,
    Int32Array,
    LoadOptions,
    StepInputs,
    StepOutputs,
)
from octavo.backends.block_origins import block_origins
from octavo.backends.host_caches import no_cache
from octavo.backends.step_checks import check_step, no_acceptance_graph
from octavo.graphs import bindings
from octavo.graphs.errors import BackendError
from octavo.graphs.ops.accept import SCHEMA as ACCEPT

if TYPE_CHECKING:
    from octavo.backends.manifest import Manifest

DEVICE = "cuda"  # CUDA_VISIBLE_DEVICES chooses which one that is


# The tensors of inputs and caches -> those of outputs, then perhaps the caches, changed in place.
Program = Callable[[Sequence[Tensor]], Sequence[Tensor]]
Accept = Callable[[Sequence[Tensor]], Tensor]


class TorchCudaExecutable:
    """`open_accept` opens the acceptance graph when it is needed.

    Where `computes_empty` is not so, a step that wants no logits is given a row, which is dropped.
    """

    def __init__(
        self,
        manifest: Manifest,
        options: LoadOptions,
        program: Program,
        open_accept: Callable[[], Accept],
        *,
        computes_empty: bool,
    ) -> None:
        if options.num_threads is not None:
            torch.set_num_threads(options.num_threads)
        self._manifest = manifest
        self._program: Program | None = program
        self._open_accept = open_accept
        self._accept: Accept | None = None
        self._computes_empty = computes_empty
        self._caches: list[Tensor] = []
        self._declared = tuple(
            manifest.spec.kv_cache_bindings(manifest.limits.block_size, manifest.kv_cache_dtype)
        )
        names = {binding.name for binding in self._declared}
        self._input_names = [one.name for one in manifest.inputs if one.name not in names]

    def allocate_kv_cache(self, num_blocks: int) -> None:
        if self._program is None:
            raise BackendError("the engine is closed: load it again")
        self._caches.clear()  # before the new ones are made
        for layer in self._declared:
            sizes = [int(size) for size in layer.shape[1:]]
            dtype = getattr(torch, layer.dtype)
            self._caches.append(torch.zeros(num_blocks, *sizes, dtype=dtype, device=DEVICE))

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        if not self._caches:
            raise no_cache()
        origins = block_origins(copies)
        destinations = torch.tensor(list(origins), device=DEVICE)
        sources = torch.tensor(list(origins.values()), device=DEVICE)
        if origins:
            for cache in self._caches:
                cache.index_copy_(0, destinations, cache.index_select(0, sources))

    @torch.no_grad()
    def run(self, inputs: StepInputs) -> StepOutputs:
        if self._program is None or len(self._caches) != len(self._declared):
            raise no_cache()
        if self._caches:
            check_step(inputs, self._manifest, len(self._caches[0]))
        try:
            arguments = [self._input(inputs, name) for name in self._input_names]
            results = self._program([*arguments, *self._caches])
            logits, *hidden = results[: len(self._manifest.spec.output_bindings)]
            return self._outputs(inputs, logits, hidden)
        except (RuntimeError, IndexError) as error:
            raise BackendError(f"the compiled graph failed in a step: {error}") from error

    @torch.no_grad()
    def accept(self, inputs: AcceptInputs) -> Int32Array:
        """On the host, where the logits are."""
        if self._accept is None:
            if self._manifest.accept_file is None:
                raise no_acceptance_graph()
            self._accept = self._open_accept()
        operands = [torch.from_numpy(getattr(inputs, one.name)) for one in ACCEPT.inputs]
        tokens: Int32Array = self._accept(operands).numpy()
        return tokens

    def close(self) -> None:
        self._accept = None
        self._caches.clear()
        self._program = None

    def _input(self, inputs: StepInputs, name: str) -> Tensor:
        array = getattr(inputs, name)
        is_rows = name == bindings.LOGITS_INDICES.name
        if is_rows and not len(array) and not self._computes_empty:
            array = np.zeros(1, np.int32)
        return torch.from_numpy(array).to(DEVICE)

    def _outputs(self, inputs: StepInputs, logits: Tensor, hidden: list[Tensor]) -> StepOutputs:
        """In host memory, without the row that nobody asked for."""
        spec = self._manifest.spec
        wants_none = bool(self._declared) and not len(inputs.logits_indices)
        states = spec.hidden_states
        arrays = []
        for tensor, by_row in (
            (logits, True),
            *((one, states is not None and states.rows == "logits") for one in hidden),
        ):
            arrays.append((tensor[:0] if wants_none and by_row else tensor).cpu().numpy())
        return StepOutputs(*arrays)
