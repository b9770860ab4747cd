"""Keeps a build's memory near what it holds: weights in files, freed memory back to the system.

Pages of a file are the system's to drop and read again; anonymous memory has to stay. transformers
maps the weights of a float32 checkpoint already. What is made of weights on the way to integers,
cast or concatenated, goes to nameless files beside the engine, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# A smaller tensor is not worth a file.
_SMALLEST_FILE = 1 << 20
_folder: ContextVar[Path | None] = ContextVar("folder", default=None)


@contextlib.contextmanager
def weights_in_files(folder: Path) -> Iterator[None]:
    """Inside, `concatenated` and `cast` keep large results in files of `folder`."""
    token = _folder.set(folder)
    try:
        yield
    finally:
        _folder.reset(token)


def keeps_weights_in_files() -> bool:
    return _folder.get() is not None


def concatenated(tensors: Sequence[Tensor]) -> Tensor:
    """`torch.cat(tensors)` along the first axis."""
    import torch

    shape = (sum(len(tensor) for tensor in tensors), *tensors[0].shape[1:])
    return torch.cat([*tensors], out=_empty(shape, tensors[0].dtype))


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return _empty(tuple(tensor.shape), dtype).copy_(tensor)


def release() -> None:
    """Frees graphs that hold themselves, and with them weights; then empty pages of the heap.

    glibc keeps what was freed between two living blocks: after matrices of a few MB were replaced
    one by one that is as much as the floats of a model.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc only
    if trim is not None:
        trim(0)


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    import torch

    folder, count = _folder.get(), math.prod(shape)
    num_bytes = count * dtype.itemsize
    if folder is None or num_bytes < _SMALLEST_FILE:
        return torch.empty(shape, dtype=dtype)
    # Its name goes at once, its space with the tensor.
    with tempfile.NamedTemporaryFile(dir=folder, prefix="weights-") as file:
        # A full disk is an error here; written through a mapping it would kill the process.
        os.posix_fallocate(file.fileno(), 0, num_bytes)
        return torch.from_file(file.name, shared=True, size=count, dtype=dtype).view(shape)
