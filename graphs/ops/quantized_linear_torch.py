"""The torch reference of `octavo::quantized_linear`, and how its packed weights are read."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.graphs.ops import torch_library
from octavo.graphs.ops.quantization import GROUP
from octavo.graphs.ops.quantized_linear import DEPTH, PANEL, SCHEMA


def unpack_weight(weight: Tensor, bits: int) -> Tensor:
    """Panels, as the schema lays them out, -> u8 [P * 32, Kp]."""
    halves = torch.stack([weight & 15, weight >> 4], 2) if bits == 4 else weight.unsqueeze(2)
    by_column = halves.permute(0, 3, 1, 2, 4)  # [P, 32, Kp / ..., values in a byte, 4]
    panels, depth = weight.shape[0], weight.shape[1] * DEPTH * halves.shape[2]
    return by_column.reshape(panels * PANEL, depth)


def unpack_groups(groups: Tensor) -> Tensor:
    """f16 [P, Kp / 32, 32] -> f32 [P * 32, Kp / 32], or [0, 0] for none."""
    return groups.transpose(1, 2).flatten(0, 1).float()


def dequantize_weight(
    weight: Tensor,
    column_scales: Tensor,
    group_scales: Tensor,
    group_minimums: Tensor,
    columns: int,
    bits: int,
    zero_point: int,
) -> Tensor:
    """The matrix f32 [N, Kp] that packed weights stand for."""
    integers = unpack_weight(weight, bits)[:columns].float() - zero_point
    if not group_scales.numel():
        return integers * column_scales[:, None]
    grouped = integers.view(columns, -1, GROUP)
    grouped = grouped * unpack_groups(group_scales)[:columns, :, None]
    if group_minimums.numel():
        grouped = grouped + unpack_groups(group_minimums)[:columns, :, None]
    return grouped.reshape(columns, -1)


def quantized_linear(
    quantized: Tensor,
    scales: Tensor,
    sums: Tensor,
    weight: Tensor,
    column_scales: Tensor,
    group_scales: Tensor,
    group_minimums: Tensor,
    bias: Tensor,
    residual: Tensor,
    columns: int,
    bits: int,
    zero_point: int,
) -> Tensor:
    """Output f32 [M, N] as the schema describes it."""
    integers = unpack_weight(weight, bits)[:columns].float() - zero_point
    values = quantized.float()
    if group_scales.numel():
        output = _by_groups(values, scales, sums, integers, group_scales, group_minimums)
    else:
        output = scales.new_zeros(len(quantized), columns)
        for group, start in enumerate(range(0, values.shape[1], GROUP)):
            product = _integer_product(values, integers, start, GROUP)
            output = output + product * scales[:, group, None]
        output = output * column_scales
    if bias.numel():
        output = output + bias
    return output + residual if residual.numel() else output


def _by_groups(
    values: Tensor,  # [M, Kp]
    scales: Tensor,  # [M, Kp / 32]
    sums: Tensor,  # [M, Kp / 32]
    integers: Tensor,  # [N, Kp]
    group_scales: Tensor,
    group_minimums: Tensor,
) -> Tensor:  # [M, N]
    columns = len(integers)
    column_group_scales = unpack_groups(group_scales)[:columns]
    column_group_minimums = unpack_groups(group_minimums)[:columns]
    output = scales.new_zeros(len(values), columns)
    for group, start in enumerate(range(0, values.shape[1], GROUP)):
        product = _integer_product(values, integers, start, GROUP)
        product = product * column_group_scales[:, group]
        if group_minimums.numel():
            product = product + sums[:, group, None].float() * column_group_minimums[:, group]
        output = output + product * scales[:, group, None]
    return output


def _integer_product(values: Tensor, integers: Tensor, start: int, size: int) -> Tensor:
    """Exact, since 32 * 127 * 255 is below 2^24: every partial sum is a float without rounding."""
    return values[:, start : start + size] @ integers[:, start : start + size].t()


def _quantized_linear_shape(
    quantized: Tensor, scales: Tensor, *operands_and_attributes: object
) -> Tensor:
    columns = operands_and_attributes[len(SCHEMA.inputs) - 2]
    assert isinstance(columns, int)
    return scales.new_empty(quantized.shape[0], columns)


OPERATOR = torch_library.register(SCHEMA, quantized_linear, _quantized_linear_shape)
