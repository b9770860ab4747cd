"""A loaded Torch-TensorRT engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

from torch import Tensor

from octavo.backends.base import LoadOptions
from octavo.backends.torch import archive
from octavo.backends.torch_cuda.executable import Accept, TorchCudaExecutable
from octavo.backends.torch_tensorrt.loading import LoadedProgram

if TYPE_CHECKING:
    from octavo.backends.manifest import Manifest


def load(model: Path, manifest: Manifest, options: LoadOptions) -> TorchCudaExecutable:
    """TensorRT computes no empty tensors; acceptance runs on the host, where the logits are."""
    return TorchCudaExecutable(
        manifest,
        options,
        LoadedProgram(model, len(manifest.spec.layers)),
        lambda: _open_accept(model.parent / str(manifest.accept_file)),
        computes_empty=False,
    )


def _open_accept(path: Path) -> Accept:
    run = archive.load(path)
    return lambda operands: cast(Tensor, run(*operands))
