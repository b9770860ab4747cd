"""4 bits a weight in groups of 32, each with a scale and a minimum in float16.

A group starts on the grid from its smallest to its largest value. Outliers make that grid coarse,
so narrower and wider ones are tried too, each refined in turns: the nearest grid points, then the
scale and minimum that fit these best (least squares). The idea is that of llama.cpp's k-quants.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from octavo.compiler.quantization.packing import PackedWeight, by_rows, pack
from octavo.graphs.ops.quantization import GROUP

LEVELS = 15  # the largest of 0, 1, ...
# Widths of the first grid, relative to the distance from smallest to largest value.
_WIDTHS = (1.0, 1.05, 0.95, 0.9, 0.85, 0.8)
_REFINEMENTS = 2


def quantize(weight: Tensor) -> PackedWeight:
    """[N, K] of any float dtype; weights that lie on such a grid already are kept exactly."""
    columns, depth = weight.shape

    def part(rows: slice) -> PackedWeight:
        values = weight[rows].float()
        padded = pad(values[:, None], (0, -depth % GROUP), mode="replicate")  # [N, 1, K]
        groups = padded.view(len(values), -1, GROUP)
        # What fills up the last group must not bend its grid.
        counted = torch.zeros(padded.shape[2])
        counted[:depth] = 1
        integers, scales, minimums = fit_groups(groups, counted.view(-1, GROUP))
        kept = integers.view(len(values), -1)[:, :depth]
        return pack(kept, 4, 0, group_scales=scales, group_minimums=minimums)

    return by_rows(columns, depth, part)


def fit_groups(
    groups: Tensor,  # f32 [N, G, 32]
    counted: Tensor,  # f32 [G, 32]: 1 for a weight, 0 for what fills up a group
) -> tuple[Tensor, Tensor, Tensor]:
    """u8 [N, G, 32], f16 [N, G], f16 [N, G]: the grid with the least squared error of those tried.

    Integers are chosen for the scale and minimum as float16 has them.
    """
    low, high = groups.amin(-1), groups.amax(-1)
    best = _rounded(groups, (high - low) / LEVELS, low)
    best_error = _error(groups, counted, *best)
    for width in _WIDTHS:
        middle, half = (high + low) / 2, (high - low) * (width / 2)
        integers = _nearest(groups, 2 * half / LEVELS, middle - half)
        for _ in range(_REFINEMENTS):
            scales, minimums = _least_squares(groups, counted, integers)
            candidate = _rounded(groups, scales, minimums)
            error = _error(groups, counted, *candidate)
            better = error < best_error
            best_error = torch.where(better, error, best_error)
            best = (
                torch.where(better[..., None], candidate[0], best[0]),
                torch.where(better, candidate[1], best[1]),
                torch.where(better, candidate[2], best[2]),
            )
            integers = candidate[0]
    return best[0].to(torch.uint8), best[1].half(), best[2].half()


def _nearest(groups: Tensor, scales: Tensor, minimums: Tensor) -> Tensor:
    divisors = torch.where(scales > 0, scales, torch.inf)[..., None]
    return ((groups - minimums[..., None]) / divisors).round_().clamp_(0, LEVELS)


def _rounded(groups: Tensor, scales: Tensor, minimums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Integers for the scale and minimum rounded to float16, and these as float32."""
    scales, minimums = scales.half().float(), minimums.half().float()
    return _nearest(groups, scales, minimums), scales, minimums


def _error(
    groups: Tensor, counted: Tensor, integers: Tensor, scales: Tensor, minimums: Tensor
) -> Tensor:
    difference = integers * scales[..., None] + minimums[..., None] - groups
    return (difference.square_() * counted).sum(-1)


def _least_squares(groups: Tensor, counted: Tensor, integers: Tensor) -> tuple[Tensor, Tensor]:
    """The line through the points (integer, weight) of each group; flat where all are one."""
    count = counted.sum(-1)
    mean_integer = (integers * counted).sum(-1) / count
    mean_weight = (groups * counted).sum(-1) / count
    centred = (integers - mean_integer[..., None]) * counted
    variance = centred.square().sum(-1)
    covariance = (centred * groups).sum(-1)
    scales = torch.where(variance > 0, covariance / variance, 0.0).clamp_(min=0)
    return scales, mean_weight - scales * mean_integer
