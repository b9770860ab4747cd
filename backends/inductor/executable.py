"""A loaded AOTInductor engine: compiled code, mapped weights, caches changed in place."""

from __future__ import annotations

import os
from collections.abc import Sequence
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
from octavo.backends.host_caches import HostCaches, no_cache
from octavo.backends.inductor.weights import map_weights
from octavo.backends.kernels import torch_operators
from octavo.backends.step_checks import check_shapes, no_acceptance_graph
from octavo.backends.torch_cuda.executable import TorchCudaExecutable
from octavo.backends.torch_cuda.operator import operator as operator_on_cuda
from octavo.graphs.errors import BackendError
from octavo.graphs.ops.accept import SCHEMA as ACCEPT

if TYPE_CHECKING:
    from octavo.backends.manifest import Manifest


class InductorExecutable:
    """No Python and no copies between the inputs and the logits of a step."""

    def __init__(self, bundle: Path, manifest: Manifest, options: LoadOptions) -> None:
        torch.set_num_threads(options.num_threads or len(os.sched_getaffinity(0)))
        files = manifest.backend_data
        self._bundle = bundle
        self._accept_file = manifest.accept_file
        self._accept: CompiledPackage | None = None  # until it is needed
        weights = map_weights(bundle / files["weights"], bundle / files["weights_index"])
        self._package: CompiledPackage | None = CompiledPackage(bundle / files["model"], weights)
        self._caches = HostCaches(
            manifest.spec.kv_cache_bindings(manifest.limits.block_size, manifest.kv_cache_dtype)
        )
        names = {binding.name for binding in self._caches.declared}
        self._input_names = [one.name for one in manifest.inputs if one.name not in names]
        self._bound: StepInputs | None = None
        self._arguments: list[Tensor] = []  # the memory of `_bound` and of the caches

    def allocate_kv_cache(self, num_blocks: int) -> None:
        if self._package is None:
            raise BackendError("the engine is closed: load it again")
        self._unbind()
        self._caches.allocate(num_blocks)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        self._caches.copy_blocks(copies)

    def run(self, inputs: StepInputs) -> StepOutputs:
        if self._package is None or not self._caches.ready:
            raise no_cache()
        if inputs is not self._bound:
            self._bind(inputs)
        logits, *hidden_states = self._package.run(self._arguments)
        return StepOutputs(logits.numpy(), *(states.numpy() for states in hidden_states))

    def accept(self, inputs: AcceptInputs) -> Int32Array:
        if self._accept is None:
            if self._accept_file is None:
                raise no_acceptance_graph()
            self._accept = CompiledPackage(self._bundle / self._accept_file, {})
        operands = [torch.from_numpy(getattr(inputs, one.name)) for one in ACCEPT.inputs]
        tokens: Int32Array = self._accept.only(operands).numpy()
        return tokens

    def close(self) -> None:
        self._unbind()
        self._caches.free()
        self._package = self._accept = None

    def _bind(self, inputs: StepInputs) -> None:
        """The object is kept, so it tells that nothing else is bound."""
        if self._caches.declared:  # heads of drafters read hidden states alone
            check_shapes(inputs)
        arrays = [getattr(inputs, name) for name in self._input_names]
        self._arguments = [torch.from_numpy(array) for array in (*arrays, *self._caches.arrays)]
        self._bound = inputs

    def _unbind(self) -> None:
        self._bound = None
        self._arguments = []


def load_on_cuda(
    bundle: Path, manifest: Manifest, options: LoadOptions, device: str
) -> TorchCudaExecutable:
    """Weights are copied to the device; acceptance runs on the host, where the logits are."""
    operator_on_cuda()  # which the compiled code calls
    files = manifest.backend_data
    mapped = map_weights(bundle / files["weights"], bundle / files["weights_index"])
    weights = {name: tensor.to(device) for name, tensor in mapped.items()}
    return TorchCudaExecutable(
        manifest,
        options,
        CompiledPackage(bundle / files["model"], weights).run,
        lambda: CompiledPackage(bundle / str(manifest.accept_file), {}).only,
        computes_empty=True,
    )


class CompiledPackage:
    """The compiled code of a `.pt2` package, and the weights that it reads where they lie."""

    def __init__(self, package: Path, weights: dict[str, Tensor]) -> None:
        torch_operators.operators()  # which the compiled code calls
        try:
            self._loader: Any = torch._C._aoti.AOTIModelPackageLoader(
                str(package), "model", True, 1, -1
            )
            self._weights = weights
            needed = {name: weights[name] for name in self._loader.get_constant_fqns()}
            self._loader.load_constants(needed, False, True, True, False)
        except (RuntimeError, KeyError) as error:
            raise BackendError(
                f"torch {torch.__version__} cannot load {package} ({error}): build the engine again"
            ) from error

    def run(self, arguments: Sequence[Tensor]) -> list[Tensor]:
        try:
            outputs: list[Tensor] = self._loader.run(arguments)
        except RuntimeError as error:
            reason = torch_operators.take_error() or str(error)
            raise BackendError(f"the compiled graph failed in a step: {reason}") from error
        return outputs

    def only(self, arguments: Sequence[Tensor]) -> Tensor:
        """The output of a graph that has one."""
        (output,) = self.run(arguments)
        return output
