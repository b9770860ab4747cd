"""The torch reference of `octavo::linear_residual`."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from octavo.graphs.ops import torch_library
from octavo.graphs.ops.linear import LINEAR_RESIDUAL


def linear_residual(
    rows: Tensor,  # f32 [M, K]
    weight: Tensor,  # f32 [N, K]
    bias: Tensor,  # f32 [N] or [0]
    residual: Tensor,  # f32 [M, N]
) -> Tensor:  # f32 [M, N]
    return functional.linear(rows, weight, bias if bias.shape[0] else None) + residual


def _shape(rows: Tensor, weight: Tensor, *_: object) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[0])


OPERATOR = torch_library.register(LINEAR_RESIDUAL, linear_residual, _shape)
