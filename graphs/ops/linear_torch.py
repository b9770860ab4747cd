"""The torch references of `octavo::linear` and `octavo::linear_residual`."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from octavo.graphs.ops import torch_library
from octavo.graphs.ops.linear import LINEAR_RESIDUAL, PANEL, SCHEMA


def linear_residual(
    rows: Tensor,  # f32 [M, K]
    weight: Tensor,  # f32 [N, K]
    bias: Tensor,  # f32 [N] or [0]
    residual: Tensor,  # f32 [M, N]
) -> Tensor:  # f32 [M, N]
    return functional.linear(rows, weight, bias if bias.shape[0] else None) + residual


def packed(weight: Tensor) -> Tensor:
    """[N, K] -> [ceil(N / PANEL), K, PANEL], the last panel padded with zeros."""
    padding = -weight.shape[0] % PANEL
    padded = functional.pad(weight, (0, 0, 0, padding))
    return padded.view(-1, PANEL, weight.shape[1]).transpose(1, 2).contiguous()


def linear(
    rows: Tensor,  # f32 [M, K]
    weight: Tensor,  # f32 [ceil(N / PANEL), K, PANEL]
    bias: Tensor,  # f32 [N] or [0]
    residual: Tensor,  # f32 [M, N] or [0, 0]
    columns: int,
) -> Tensor:  # f32 [M, N]
    unpacked = weight.transpose(1, 2).flatten(0, 1)[:columns]
    product = functional.linear(rows, unpacked, bias if bias.shape[0] else None)
    return product + residual if residual.shape[1] else product


def _linear_shape(
    rows: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, columns: int
) -> Tensor:
    return rows.new_empty(rows.shape[0], columns)


def _shape(rows: Tensor, weight: Tensor, *_: object) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[0])


LINEAR_OPERATOR = torch_library.register(SCHEMA, linear, _linear_shape)
OPERATOR = torch_library.register(LINEAR_RESIDUAL, linear_residual, _shape)
