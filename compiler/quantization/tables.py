"""Embedding tables of 8 bits: groups of 32 along a row, each with a scale and perhaps a minimum.

Rows are looked up one by one, so they lie as they are. A scale a row would add the error of its
largest element to all of it; a group's costs 12 % more and is 2 to 3 times closer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from octavo.compiler.quantization.packing import PackedWeight
from octavo.graphs.ops.quantization import GROUP, LARGEST
from octavo.graphs.ops.quantized_linear_torch import unpack_groups, unpack_weight

_ROWS_AT_A_TIME = 1024


@dataclass(frozen=True)
class Table:
    """row = integers * scales + minimums, groups end to end, the last one cut at the row's end."""

    integers: Tensor  # i8 [V, G, 32]
    scales: Tensor  # f32 [V, G, 1]
    minimums: Tensor | None  # f32 [V, G, 1]

    @property
    def num_bytes(self) -> int:
        given = (self.integers, self.scales, self.minimums)
        return sum(tensor.nbytes for tensor in given if tensor is not None)


def quantize(weight: Tensor) -> Table:
    """[V, K] of any float dtype: scale = largest magnitude of a group / 127, halves to even."""
    rows, depth = weight.shape
    groups = -(-depth // GROUP)
    integers = torch.empty(rows, groups, GROUP, dtype=torch.int8)
    scales = torch.empty(rows, groups, 1)
    for start in range(0, rows, _ROWS_AT_A_TIME):
        part = slice(start, start + _ROWS_AT_A_TIME)
        padded = pad(weight[part].float(), (0, -depth % GROUP))
        values = padded.view(-1, groups, GROUP)
        scales[part] = values.abs().amax(-1, keepdim=True) / LARGEST
        divisors = torch.where(scales[part] > 0, scales[part], torch.inf)
        rounded = (values / divisors).round().clamp(-LARGEST, LARGEST)
        integers[part] = rounded.to(torch.int8)
    return Table(integers, scales, None)


def from_packed(packed: PackedWeight, depth: int) -> Table:
    """The rows of a matrix with grouped scales, exactly: all its integers fit into 8 bits."""
    rows, groups = packed.columns, -(-depth // GROUP)
    unpacked = unpack_weight(packed.weight, packed.bits)[:rows, : groups * GROUP]
    integers = (unpacked.to(torch.int16) - packed.zero_point).to(torch.int8)
    minimums = None
    if packed.group_minimums.numel():
        minimums = unpack_groups(packed.group_minimums)[:rows, :groups, None].contiguous()
    return Table(
        integers.view(rows, groups, GROUP),
        unpack_groups(packed.group_scales)[:rows, :groups, None].contiguous(),
        minimums,
    )
