"""The tensors of a folder of safetensors: what their headers say of them, and their values."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from octavo.backends.bundle import sha256_of
from octavo.compiler.checkpoints import safetensors_files
from octavo.graphs.errors import CheckpointError

if TYPE_CHECKING:
    import torch

_SHOWN_NAMES = 3


@dataclass(frozen=True)
class StoredTensor:
    """`dtype` in the format's terms: "F32", "BF16", "I64", ..."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


class TensorFolder:
    """Opening reads the headers only, each checked against its file; torch comes with `load`.

    Raises CheckpointError if there are no safetensors or one of them is damaged.
    """

    def __init__(self, folder: Path, named: str | None = None) -> None:
        """`named`: the one file that holds everything, where it is not `model.safetensors`."""
        self.path = folder
        self._files = safetensors_files.weight_files(folder, named)
        self._tensors = {
            name: tensor
            for file in self._files
            if file.suffix == ".safetensors"
            for name, tensor in _headers(file)
        }

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """By their full names."""
        return self._tensors

    def shape(self, name: str) -> tuple[int, ...] | None:
        """None where there is no such tensor."""
        tensor = self._tensors.get(name)
        return None if tensor is None else tensor.shape

    def require(self, expected: Mapping[str, tuple[int, ...]], owner: str) -> None:
        """Raises CheckpointError naming the tensors that are missing or of another shape.

        owner  what they are the tensors of, for the message
        """
        missing = [name for name in expected if name not in self._tensors]
        if missing:
            raise CheckpointError(
                f"{self.path} lacks {len(missing)} of the {len(expected)} tensors of {owner} "
                f"({shown(missing)}): get the complete checkpoint"
            )
        wrong = [
            f"{name} is {list(found.shape)} instead of {list(shape)}"
            for name, shape in expected.items()
            if (found := self._tensors[name]).shape != shape
        ]
        if wrong:
            raise CheckpointError(
                f"{self.path} has {len(wrong)} tensors of other shapes than those of {owner} "
                f"({shown(wrong)}): get the drafter that was made for this model"
            )

    def load(
        self, names: Iterable[str], dtype: torch.dtype | None = None
    ) -> dict[str, torch.Tensor]:
        """The tensors' values on the CPU, converted to `dtype` if one is given."""
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self._tensors[name].file, []).append(name)
        loaded: dict[str, torch.Tensor] = {}
        for file, own in by_file.items():
            with _opened(file, "pt") as tensors:
                for name in own:
                    tensor = tensors.get_tensor(name)
                    loaded[name] = tensor if dtype is None else tensor.to(dtype)
        return loaded

    def content_digest(self, *more: Path) -> str:
        """Hex SHA-256 over the names and contents of the weight files and of `more` files."""
        lines = (f"{file.name} {sha256_of(file)}\n" for file in sorted({*self._files, *more}))
        return hashlib.sha256("".join(lines).encode()).hexdigest()


def shown(names: list[str]) -> str:
    """The first few of many, for a message."""
    return ", ".join(names[:_SHOWN_NAMES]) + (", ..." if len(names) > _SHOWN_NAMES else "")


def _headers(file: Path) -> list[tuple[str, StoredTensor]]:
    with _opened(file, "np") as tensors:
        names: list[str] = list(tensors.keys())  # the handle itself cannot be iterated over
        slices = [(name, tensors.get_slice(name)) for name in names]
        return [
            (name, StoredTensor(file, one.get_dtype(), tuple(one.get_shape())))
            for name, one in slices
        ]


def _opened(file: Path, framework: str) -> Any:
    return safe_open(str(file), framework=framework)
