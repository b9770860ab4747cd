"""Blocks of a GGUF file as quantised weights, without rounding them a second time.

transformers permutes rows of queries and keys, and passes concatenate and tie matrices, so names
do not say which blocks a matrix of the graph came from. Its rows do: each is looked up among the
dequantised rows of the file, and what was found is compared bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from numpy.typing import NDArray
from torch import Tensor

from octavo.compiler.quantization.packing import PackedWeight, by_rows, pack

Bytes = NDArray[np.uint8]

_ROWS_AT_A_TIME = 1024


class GgufTensor(Protocol):
    """What the `gguf` package's reader says of a tensor."""

    @property
    def tensor_type(self) -> GGMLQuantizationType: ...

    @property
    def data(self) -> NDArray[Any]:
        """u8 [..., N, bytes of a row] for blocks, mapped from the file"""


@dataclass(frozen=True)
class _Format:
    """How a block of 32 weights lies in the file: float16 values, then the integers."""

    bits: int
    zero_point: int
    num_halves: int  # 1: a scale; 2: a scale and a minimum

    def pack(self, rows: Bytes) -> PackedWeight:
        """[N, bytes of a row]"""
        num_bytes = 2 * self.num_halves + 4 * self.bits
        blocks = rows.reshape(len(rows), -1, num_bytes)
        header = np.ascontiguousarray(blocks[..., : 2 * self.num_halves]).view(np.float16)
        content = blocks[..., 2 * self.num_halves :]
        minimums = torch.from_numpy(header[..., 1].copy()) if self.num_halves == 2 else None
        return pack(
            torch.from_numpy(self._integers(content).reshape(len(rows), -1)),
            self.bits,
            self.zero_point,
            group_scales=torch.from_numpy(header[..., 0].copy()),
            group_minimums=minimums,
        )

    def _integers(self, content: Bytes) -> Bytes:
        """u8 [N, blocks, 32]; the low halves of 16 bytes are the first 16 weights."""
        if self.bits == 4:
            return np.concatenate([content & 15, content >> 4], axis=-1)
        return content ^ np.uint8(0x80)  # s8 -> u8, 128 more


FORMATS: Mapping[GGMLQuantizationType, _Format] = {
    GGMLQuantizationType.Q4_0: _Format(bits=4, zero_point=8, num_halves=1),
    GGMLQuantizationType.Q4_1: _Format(bits=4, zero_point=0, num_halves=2),
    GGMLQuantizationType.Q8_0: _Format(bits=8, zero_point=128, num_halves=1),
}


@dataclass(frozen=True)
class Imported:
    packed: PackedWeight
    block_type: str


class GgufBlocks:
    """The rows of all tensors whose blocks fit, to be found by what they stand for."""

    def __init__(self, tensors: Iterable[GgufTensor]) -> None:
        by_type: dict[GGMLQuantizationType, list[GgufTensor]] = {}
        for tensor in tensors:
            by_type.setdefault(tensor.tensor_type, []).append(tensor)
        self._indices = {
            kind: _RowIndex(kind, found) for kind, found in by_type.items() if kind in FORMATS
        }
        self.foreign_types = tuple(
            sorted(f"{len(found)} x {kind.name}" for kind, found in _quantized(by_type).items())
        )

    def find(self, matrix: Tensor, bits: Sequence[int]) -> Imported | None:
        """The blocks that f32 [N, K] was dequantised from, all of one type of so many bits."""
        for kind, index in self._indices.items():
            if FORMATS[kind].bits in bits:
                packed = index.find(matrix)
                if packed is not None:
                    return Imported(packed, kind.name)
        return None


def _quantized(
    by_type: Mapping[GGMLQuantizationType, list[GgufTensor]],
) -> dict[GGMLQuantizationType, list[GgufTensor]]:
    """Types of blocks that are not imported."""
    floats = {GGMLQuantizationType[name] for name in ("F16", "F32", "F64", "BF16")}
    return {kind: found for kind, found in by_type.items() if kind not in {*FORMATS, *floats}}


class _RowIndex:
    """Rows of the tensors of one type, by a hash of their floats."""

    def __init__(self, kind: GGMLQuantizationType, tensors: Sequence[GgufTensor]) -> None:
        self._kind = kind
        self._rows = [tensor.data.reshape(-1, tensor.data.shape[-1]) for tensor in tensors]
        hashes = np.concatenate([_hashes(len(rows), self._floats(rows)) for rows in self._rows])
        places = [
            np.stack([np.full(len(rows), number), np.arange(len(rows))], axis=1)
            for number, rows in enumerate(self._rows)
        ]
        order = np.argsort(hashes, kind="stable")
        self._hashes = hashes[order]
        self._places: NDArray[np.int64] = np.concatenate(places)[order]  # [rows, 2]: tensor, row

    def find(self, matrix: Tensor) -> PackedWeight | None:
        columns, depth = matrix.shape
        wanted = _hashes(columns, lambda rows: matrix[rows].numpy())
        at = np.searchsorted(self._hashes, wanted).clip(max=len(self._hashes) - 1)
        if (self._hashes[at] != wanted).any():
            return None
        places = self._places[at]
        kind, make = self._kind, FORMATS[self._kind].pack
        for start in range(0, columns, _ROWS_AT_A_TIME):
            rows = slice(start, start + _ROWS_AT_A_TIME)
            blocks = self._gathered(places[rows])
            if blocks is None or not np.array_equal(
                gguf.dequantize(blocks, kind), matrix[rows].numpy()
            ):
                return None
        return by_rows(columns, depth, lambda rows: make(self._required(places[rows])))

    def _floats(self, rows: Bytes) -> Callable[[slice], NDArray[np.float32]]:
        return lambda chosen: gguf.dequantize(rows[chosen], self._kind)

    def _gathered(self, places: NDArray[np.int64]) -> Bytes | None:
        """[N, bytes of a row]; None if the rows differ in length, so cannot be one matrix's."""
        chosen = [self._rows[number][row] for number, row in places.tolist()]
        return np.stack(chosen) if len({len(row) for row in chosen}) == 1 else None

    def _required(self, places: NDArray[np.int64]) -> Bytes:
        rows = self._gathered(places)
        assert rows is not None
        return rows


def _hashes(count: int, rows: Callable[[slice], NDArray[np.float32]]) -> NDArray[np.int64]:
    hashes = np.empty(count, np.int64)
    for start in range(0, count, _ROWS_AT_A_TIME):
        part = np.ascontiguousarray(rows(slice(start, start + _ROWS_AT_A_TIME)))
        hashes[start : start + len(part)] = [hash(row.tobytes()) for row in part]
    return hashes
