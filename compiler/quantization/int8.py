"""8 bits a weight, symmetric, one scale for each column of the output."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.compiler.quantization.packing import PackedWeight, by_rows, pack
from octavo.graphs.ops.quantization import LARGEST

ZERO_POINT = 128


def quantize(weight: Tensor) -> PackedWeight:
    """[N, K] of any float dtype: scale = largest magnitude of a row / 127, halves to even.

    Every weight is off by at most half a scale; a row of zeros stays one.
    """
    columns, depth = weight.shape

    def part(rows: slice) -> PackedWeight:
        values = weight[rows].float()
        scales = values.abs().amax(1) / LARGEST
        # Without a scale above zero, all of a row rounds to zero.
        divisors = torch.where(scales > 0, scales, torch.inf)
        integers = (values / divisors[:, None]).round().clamp(-LARGEST, LARGEST)
        shifted = (integers + ZERO_POINT).to(torch.uint8)
        return pack(shifted, 8, ZERO_POINT, column_scales=scales)

    return by_rows(columns, depth, part)
