"""A file of tensors that is mapped instead of read: processes that serve one engine share it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.graphs.errors import BackendError

# Aligned weights can be read by the widest loads; a page keeps tensors of different use apart.
_ALIGNMENT = 4096


def write_weights(tensors: Mapping[str, Tensor], data: Path, index: Path) -> None:
    """Writes `data`, the bytes, and `index`, JSON: dtype, shape and offset by name."""
    records: dict[str, Any] = {}
    with data.open("wb") as file:
        for name, tensor in tensors.items():
            file.write(bytes(-file.tell() % _ALIGNMENT))
            records[name] = {
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "offset": file.tell(),
            }
            if tensor.numel():
                flat = tensor.detach().contiguous().reshape(-1)
                flat.view(torch.uint8).numpy().tofile(file)
        file.write(bytes(-file.tell() % _ALIGNMENT))
    index.write_text(json.dumps(records, indent=1))


def map_weights(data: Path, index: Path) -> dict[str, Tensor]:
    """The tensors of both files; their memory is the file's and is not to be written to.

    Raises BackendError if the files do not belong together.
    """
    try:
        records = json.loads(index.read_text())
        size = data.stat().st_size
        whole = torch.from_file(str(data), shared=False, size=size, dtype=torch.uint8)  # mapped
        return {name: _view(whole, record) for name, record in records.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise BackendError(
            f"the weights in {data} cannot be mapped ({error}): copy or build the engine again"
        ) from error


def _view(whole: Tensor, record: Mapping[str, Any]) -> Tensor:
    dtype: torch.dtype = getattr(torch, record["dtype"])
    shape = [int(size) for size in record["shape"]]
    start = int(record["offset"])
    size = math.prod(shape) * dtype.itemsize
    return whole[start : start + size].view(dtype).view(shape)
