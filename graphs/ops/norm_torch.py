"""The torch references of `octavo::norm` and `octavo::norm_quantize`."""

from __future__ import annotations

from torch import Tensor

from octavo.graphs.ops import torch_library
from octavo.graphs.ops.norm import NORM, NORM_QUANTIZE
from octavo.graphs.ops.quantization_torch import quantize, quantized_shapes


def norm(
    rows: Tensor,  # f32 [M, K]
    residual: Tensor,  # f32 [M, K] or [0, 0]
    weight: Tensor,  # f32 [K] or [0]
    bias: Tensor,  # f32 [K] or [0]
    epsilon: float,
    centered: int,
) -> tuple[Tensor, Tensor]:  # f32 [M, K]; the sum [M, K] or [0, K]
    added = residual.shape[1] > 0
    x = rows + residual if added else rows
    shifted = x - x.mean(-1, keepdim=True) if centered else x
    output = shifted * (shifted.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    if weight.shape[0]:
        output = output * weight
    if bias.shape[0]:
        output = output + bias
    return output, x if added else rows.new_empty(0, rows.shape[1])


def norm_quantize(
    rows: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, epsilon: float, centered: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    output, total = norm(rows, residual, weight, bias, epsilon, centered)
    return (*quantize(output), total)


def _sum_shape(rows: Tensor, residual: Tensor) -> Tensor:
    depth = rows.shape[1]
    return rows.new_empty(rows.shape[0] if residual.shape[1] > 0 else 0, depth)


def _norm_shapes(rows: Tensor, residual: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), _sum_shape(rows, residual)


def _norm_quantize_shapes(
    rows: Tensor, residual: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (*quantized_shapes(rows, rows.shape[1]), _sum_shape(rows, residual))


NORM_OPERATOR = torch_library.register(NORM, norm, _norm_shapes)
NORM_QUANTIZE_OPERATOR = torch_library.register(NORM_QUANTIZE, norm_quantize, _norm_quantize_shapes)
