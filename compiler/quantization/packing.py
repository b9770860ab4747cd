"""Quantised weights in the layout of `octavo::quantized_linear`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from octavo.graphs.ops.quantization import GROUP
from octavo.graphs.ops.quantized_linear import DEPTH, PANEL
from octavo.graphs.ops.quantized_linear_torch import dequantize_weight

# Weights that are quantised at a time: what a few of such temporaries take stays in the caches.
_BLOCK_ELEMENTS = 1 << 18


@dataclass(frozen=True)
class PackedWeight:
    """A matrix [N, K] as operands and attributes of `octavo::quantized_linear`."""

    weight: Tensor  # u8 [P, Kp / 4, 32, 4], or [P, Kp / 8, 32, 4] of 4 bits
    column_scales: Tensor  # f32 [N] or [0]
    group_scales: Tensor  # f16 [P, Kp / 32, 32] or [0, 0, 0]
    group_minimums: Tensor  # f16 [P, Kp / 32, 32] or [0, 0, 0]
    columns: int
    bits: int
    zero_point: int

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.weight, self.column_scales, self.group_scales, self.group_minimums

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def dequantized(self, depth: int) -> Tensor:
        """f32 [N, depth]: the matrix that these numbers stand for."""
        matrix = dequantize_weight(*self.tensors, self.columns, self.bits, self.zero_point)
        return matrix[:, :depth]


def pack(
    integers: Tensor,  # u8 [N, K]
    bits: int,
    zero_point: int,
    *,
    column_scales: Tensor | None = None,  # f32 [N]
    group_scales: Tensor | None = None,  # f16 [N, ceil(K / 32)]
    group_minimums: Tensor | None = None,  # f16 [N, ceil(K / 32)]
) -> PackedWeight:
    columns, depth = integers.shape
    return PackedWeight(
        weight=_panels(integers, bits, zero_point),
        column_scales=integers.new_zeros(0).float() if column_scales is None else column_scales,
        group_scales=_group_panels(group_scales, depth),
        group_minimums=_group_panels(group_minimums, depth),
        columns=columns,
        bits=bits,
        zero_point=zero_point,
    )


def by_rows(columns: int, depth: int, make: Callable[[slice], PackedWeight]) -> PackedWeight:
    """The matrix [columns, depth] packed by `make` a few whole panels at a time.

    So temporaries stay small whatever the matrix's size.
    """
    step = max(1, _BLOCK_ELEMENTS // (depth * PANEL)) * PANEL
    first = make(slice(0, step))
    weight, *others = (_room(tensor, columns) for tensor in first.tensors)
    column_scales, group_scales, group_minimums = others
    whole = PackedWeight(
        weight, column_scales, group_scales, group_minimums, columns, first.bits, first.zero_point
    )
    for start in range(0, columns, step):
        part = make(slice(start, start + step)) if start else first
        for target, tensor in zip(whole.tensors, part.tensors, strict=True):
            position = start // _columns_of_a_row(tensor)
            target[position : position + len(tensor)] = tensor
    return whole


def _columns_of_a_row(tensor: Tensor) -> int:
    """Scales of columns have one, panels have several."""
    return 1 if tensor.dim() == 1 else PANEL


def _room(part: Tensor, columns: int) -> Tensor:
    """For the whole of what `part` is the beginning of; empty if that is."""
    rows = -(-columns // _columns_of_a_row(part)) if part.numel() else 0
    return part.new_empty(rows, *part.shape[1:])


def _panels(integers: Tensor, bits: int, zero_point: int) -> Tensor:
    columns, depth = integers.shape
    padded = pad(integers, (0, -depth % GROUP, 0, -columns % PANEL), value=zero_point)
    quads = padded.view(-1, PANEL, padded.shape[1] // DEPTH, DEPTH).transpose(1, 2)
    if bits == 8:
        return quads.contiguous()
    return quads[:, 0::2] | (quads[:, 1::2] << 4)


def _group_panels(groups: Tensor | None, depth: int) -> Tensor:
    if groups is None:
        return torch.zeros(0, 0, 0, dtype=torch.float16)
    padded_groups = (depth + -depth % GROUP) // GROUP
    missing = padded_groups - groups.shape[1]
    padded = pad(groups, (0, missing, 0, -len(groups) % PANEL))
    return padded.view(-1, PANEL, padded_groups).transpose(1, 2).contiguous()
