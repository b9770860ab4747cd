"""Reads a GGUF file's header with every offset checked against the file's size.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf` package reads past the
end of a truncated file without noticing, and takes seconds for a vocabulary of 50,000 tokens.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.graphs.errors import CheckpointError, UnsupportedModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_LONGEST_ARRAY = 1 << 28
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True)
class GgufTensor:
    name: str
    shape: tuple[int, ...]  # fastest axis first, as in the file
    ggml_type: int
    offset: int  # from the start of the data


@dataclass(frozen=True)
class GgufHeader:
    """Metadata without the content of its arrays, and the tensors; all lie within the file."""

    metadata: Mapping[str, Any]
    tensors: tuple[GgufTensor, ...]

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])


def read_header(path: Path) -> GgufHeader:
    """Raises CheckpointError for a damaged file, UnsupportedModelError for an unreadable type."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data[:4] != _MAGIC:
                raise CheckpointError(f"{path} is no GGUF file, it does not start with {_MAGIC!r}")
            header, data_start = _Cursor(data).header(path)
            size = len(data)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from None
    except (struct.error, ValueError) as error:  # ValueError: an empty file, broken UTF-8
        raise CheckpointError(
            f"{path} is truncated or damaged in its header ({error}): download it again"
        ) from None
    if not isinstance(header.metadata.get("general.architecture"), str):
        raise CheckpointError(f"{path} names no general.architecture: convert it again")
    _check_tensors(path, header, size - data_start)
    return header


class _Cursor:
    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.position = len(_MAGIC)

    def header(self, path: Path) -> tuple[GgufHeader, int]:
        (version,) = self.unpack("<I")
        if version not in _VERSIONS:
            raise CheckpointError(
                f"{path} has GGUF version {version}, versions 2 and 3 are read: convert it again"
            )
        num_tensors, num_values = self.unpack("<QQ")
        metadata = dict(self.entry() for _ in range(num_values))
        tensors = tuple(self.tensor() for _ in range(num_tensors))
        alignment = int(metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
        if alignment < 1:
            raise ValueError(f"alignment {alignment}")
        return GgufHeader(metadata, tensors), -(-self.position // alignment) * alignment

    def unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self.data, self.position)
        self.position += struct.calcsize(layout)
        return values

    def string(self) -> str:
        start = self.skip_string()
        return self.data[start : self.position].decode()

    def skip_string(self) -> int:
        """Returns where the string's bytes begin."""
        (length,) = self.unpack("<Q")
        start = self.position
        if length > len(self.data) - start:
            raise ValueError(f"a string of {length} bytes at byte {start}")
        self.position += length
        return start

    def entry(self) -> tuple[str, Any]:
        name = self.string()
        (kind,) = self.unpack("<I")
        if kind == _STRING:
            return name, self.string()
        if kind == _ARRAY:
            self.skip_array()
            return name, None
        if kind not in _SCALARS:
            raise ValueError(f"{name} has the unknown type {kind}")
        return name, self.unpack("<" + _SCALARS[kind])[0]

    def skip_array(self) -> None:
        kind, count = self.unpack("<IQ")
        if kind in _SCALARS:
            self.position += count * struct.calcsize("<" + _SCALARS[kind])
        elif kind == _STRING and count <= _LONGEST_ARRAY:
            for _ in range(count):
                self.skip_string()
        else:
            raise ValueError(f"an array of {count} values of type {kind}")

    def tensor(self) -> GgufTensor:
        name = self.string()
        (num_axes,) = self.unpack("<I")
        shape = self.unpack(f"<{num_axes}Q")
        ggml_type, offset = self.unpack("<IQ")
        return GgufTensor(name, shape, ggml_type, offset)


def _check_tensors(path: Path, header: GgufHeader, data_size: int) -> None:
    names = {kind: _type_name(kind) for kind in {tensor.ggml_type for tensor in header.tensors}}
    for tensor in header.tensors:
        name = names[tensor.ggml_type]
        if name is None:
            raise UnsupportedModelError(
                f"{path} stores {tensor.name} as {_any_name(tensor.ggml_type)}, which "
                "cannot be turned into floats: choose a file of another quantization, such as Q8_0"
            )
        end = tensor.offset + _num_bytes(tensor)
        if end > data_size:
            raise CheckpointError(
                f"{path} is truncated, {tensor.name} ends at byte {end} of the data, the file has "
                f"{max(data_size, 0)}: download it again"
            )


def _num_bytes(tensor: GgufTensor) -> int:
    import gguf

    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.ggml_type)]
    return math.prod(tensor.shape) // block * size


def _type_name(ggml_type: int) -> str | None:
    """The type's name if the `gguf` package turns it into floats, else None."""
    import gguf
    import numpy as np

    try:
        kind = gguf.GGMLQuantizationType(ggml_type)
        gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError):
        return None
    return str(kind.name)


def _any_name(ggml_type: int) -> str:
    import gguf

    try:
        return str(gguf.GGMLQuantizationType(ggml_type).name)
    except ValueError:
        return f"number {ggml_type}"
