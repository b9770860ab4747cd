"""Gathers, scatters, top-k, and tensors made from nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from octavo.backends.onnx_lowering.lowering import LoweringContext, lowers


@lowers("aten.embedding.default")
def _embedding(c: LoweringContext, weight: ir.Value, ids: ir.Value, *_: Any) -> ir.Value:
    return c.op("Gather", weight, ids, axis=0)


@lowers("aten.index_select.default")
def _index_select(c: LoweringContext, x: ir.Value, dim: int, index: ir.Value) -> ir.Value:
    return c.op("Gather", x, index, axis=dim)


@lowers("aten.gather.default")
def _gather(c: LoweringContext, x: ir.Value, dim: int, index: ir.Value, **_: Any) -> ir.Value:
    return c.op("GatherElements", x, index, axis=dim)


@lowers("aten.index.Tensor")
def _index(c: LoweringContext, x: ir.Value, indices: Sequence[ir.Value | None]) -> ir.Value:
    """One index: Gather along its axis. Several, on adjoining axes: GatherND, those in front."""
    axes = [axis for axis, index in enumerate(indices) if index is not None]
    if len(axes) == 1:
        return c.op("Gather", x, indices[axes[0]], axis=axes[0])
    rank = c.fake_of(0).dim()
    if axes != list(range(axes[0], axes[-1] + 1)):
        raise AssertionError("aten.index with a gap between its indices")
    rest = [axis for axis in range(rank) if axis not in axes]
    moved = c.op("Transpose", x, perm=axes + rest) if axes[0] else x
    chosen: list[ir.Value] = [index for index in indices if index is not None]
    shape = c.op("Shape", chosen[0])
    for index in chosen[1:]:
        shape = c.op("Shape", c.op("Add", c.op("Expand", chosen[0], shape), index))
    columns = [c.op("Unsqueeze", c.op("Expand", i, shape), c.ints(-1)) for i in chosen]
    gathered = c.op("GatherND", moved, c.op("Concat", *columns, axis=-1))
    if not axes[0]:
        return gathered
    front = c.fake.dim() - len(rest)
    before = [front + i for i in range(axes[0])]
    after = [front + i for i in range(axes[0], len(rest))]
    return c.op("Transpose", gathered, perm=[*before, *range(front), *after])


@lowers("aten.topk.default")
def _topk(
    c: LoweringContext,
    x: ir.Value,
    k: int,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,  # noqa: A002
) -> tuple[ir.Value, ...]:
    # Sorted always: the order of equal scores must not depend on the batch.
    return c.builder.nodes_of("TopK", [x, c.size(k)], 2, axis=dim, largest=int(largest), sorted=1)


@lowers("aten.scatter.value")
def _scatter_value(
    c: LoweringContext, x: ir.Value, dim: int, index: ir.Value, value: float
) -> ir.Value:
    updates = c.op("Expand", c.scalar(value, c.fake.dtype), c.op("Shape", index))
    return c.op("ScatterElements", x, index, updates, axis=dim)


@lowers("aten.scatter.src")
def _scatter(c: LoweringContext, x: ir.Value, dim: int, index: ir.Value, src: ir.Value) -> ir.Value:
    if list(c.fake_of(2).shape) != list(c.fake_of(3).shape):
        axes = c.ints(*range(c.fake.dim()))
        zeros = c.ints(*[0] * c.fake.dim())
        src = c.op("Slice", src, zeros, c.op("Shape", index), axes)
    return c.op("ScatterElements", x, index, src, axis=dim)


@lowers("aten.slice_scatter.default")
def _slice_scatter(
    c: LoweringContext,
    x: ir.Value,
    src: ir.Value,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: int = 1,
) -> ir.Value:
    """Slices along `dim` with static bounds: what comes before, `src`, what comes after."""
    size = c.fake.shape[dim]
    first = start or 0
    last = size if end is None or end > size else end
    parts = [src]
    if first:
        parts.insert(0, c.op("Slice", x, c.ints(0), c.ints(first), c.ints(dim)))
    if last != size:
        parts.append(c.op("Slice", x, c.ints(last), c.ints(np.iinfo(np.int64).max), c.ints(dim)))
    if step != 1:
        raise AssertionError("slice_scatter with a step")
    return c.op("Concat", *parts, axis=dim) if len(parts) > 1 else src


def _filled(c: LoweringContext, shape: ir.Value, value: float) -> ir.Value:
    return c.op("Expand", c.scalar(value, c.fake.dtype), shape)


@lowers("aten.zeros_like.default")
def _zeros_like(c: LoweringContext, x: ir.Value, **_: Any) -> ir.Value:
    return _filled(c, c.op("Shape", x), 0)


@lowers("aten.ones_like.default")
def _ones_like(c: LoweringContext, x: ir.Value, **_: Any) -> ir.Value:
    return _filled(c, c.op("Shape", x), 1)


@lowers("aten.full_like.default")
def _full_like(c: LoweringContext, x: ir.Value, value: float, **_: Any) -> ir.Value:
    return _filled(c, c.op("Shape", x), value)


@lowers("aten.zeros.default")
def _zeros(c: LoweringContext, sizes: Sequence[Any], **_: Any) -> ir.Value:
    return _filled(c, c.exact_shape(sizes), 0)


@lowers("aten.ones.default")
def _ones(c: LoweringContext, sizes: Sequence[Any], **_: Any) -> ir.Value:
    return _filled(c, c.exact_shape(sizes), 1)


@lowers("aten.full.default")
def _full(c: LoweringContext, sizes: Sequence[Any], value: float, **_: Any) -> ir.Value:
    return _filled(c, c.exact_shape(sizes), value)


@lowers("aten.new_zeros.default")
def _new_zeros(c: LoweringContext, _: ir.Value, sizes: Sequence[Any], **__: Any) -> ir.Value:
    return _filled(c, c.exact_shape(sizes), 0)


@lowers("aten.arange.default", "aten.arange.start", "aten.arange.start_step")
def _arange(c: LoweringContext, *bounds: Any, **_: Any) -> ir.Value:
    start, end, step = (0, *bounds, 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    dtype = c.fake.dtype
    limits = []
    for bound in (start, end, step):
        if isinstance(bound, ir.Value):
            scalar = c.op("Squeeze", bound, c.ints(0))
            limits.append(scalar if dtype == torch.int64 else c.cast(scalar, dtype))
        else:
            limits.append(c.scalar(bound, dtype))
    return c.op("Range", *limits)
