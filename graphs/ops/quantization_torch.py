"""The torch reference of `octavo::quantize`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.graphs.ops import torch_library
from octavo.graphs.ops.quantization import GROUP, LARGEST, SCHEMA

# The inverse of less is infinite, and infinity times a zero of its group no number.
_SMALLEST = 3.7323e-37

Quantized = tuple[Tensor, Tensor, Tensor]  # i8 [M, Kp], f32 [M, Kp / 32], i32 [M, Kp / 32]


def quantize(rows: Tensor) -> Quantized:  # f32 [M, K]
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[1] % GROUP))
    count, depth = padded.shape
    groups = padded.view(count, depth // GROUP, GROUP)
    largest = groups.abs().amax(-1)
    inverse = LARGEST / largest.clamp(min=_SMALLEST)
    quantized = (groups * inverse[..., None]).round().clamp(-LARGEST, LARGEST)
    sums = quantized.sum(-1).to(torch.int32)
    return quantized.view(count, depth).to(torch.int8), largest / LARGEST, sums


def quantized_shapes(rows: Any, depth: int) -> Quantized:
    """Empty results of quantising [M, depth], with the M of `rows`."""
    padded = -(-depth // GROUP) * GROUP
    count = rows.shape[0]
    return (
        rows.new_empty(count, padded, dtype=torch.int8),
        rows.new_empty(count, padded // GROUP),
        rows.new_empty(count, padded // GROUP, dtype=torch.int32),
    )


def _shapes(rows: Tensor) -> Quantized:
    return quantized_shapes(rows, rows.shape[1])


OPERATOR = torch_library.register(SCHEMA, quantize, _shapes)
