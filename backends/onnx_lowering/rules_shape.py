"""Views: reshapes, transposes, concatenation, splits, slices, and arithmetic on sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from octavo.backends.onnx_lowering.lowering import LoweringContext, lowers

_END = np.iinfo(np.int64).max


@lowers("aten.sym_size.int")
def _sym_size(c: LoweringContext, x: ir.Value, dim: int) -> ir.Value:
    """i64 [1]; every symbolic size has this form."""
    dim %= c.fake_of(0).dim()
    return c.op("Shape", x, start=dim, end=dim + 1)


def _size_arithmetic(op_type: str) -> Any:
    def rule(c: LoweringContext, a: Any, b: Any) -> ir.Value:
        return c.op(op_type, c.size(a), c.size(b))

    return rule


for _name, _op_type in {"add": "Add", "sub": "Sub", "mul": "Mul", "floordiv": "Div"}.items():
    lowers(f"_operator.{_name}")(_size_arithmetic(_op_type))


@lowers(
    "aten.view.default",
    "aten.reshape.default",
    "aten.flatten.using_ints",
)
def _reshape(c: LoweringContext, x: ir.Value, *_: Any) -> ir.Value:
    """The result's own shape says it all; a single unknown size is inferred."""
    sizes = c.fake.shape
    if sum(not isinstance(size, int) for size in sizes) <= 1:
        return c.op(
            "Reshape", x, c.ints(*[s if isinstance(s, int) else -1 for s in sizes]), allowzero=1
        )
    return c.op("Reshape", x, c.shape(_[0]))


@lowers("aten.expand.default")
def _expand(
    c: LoweringContext, x: ir.Value, sizes: Sequence[Any], implicit: bool = False
) -> ir.Value:
    if list(c.fake_of(0).shape) == list(c.fake.shape):
        return x
    # ONNX broadcasts both ways: a size of one keeps the dimension.
    kept = [1 if not isinstance(s, ir.Value) and s == -1 else s for s in sizes]
    return c.op("Expand", x, c.exact_shape(kept))


@lowers("aten.copy.default")
def _copy(c: LoweringContext, destination: ir.Value, source: ir.Value, *_: Any) -> ir.Value:
    """The source in the destination's shape and dtype."""
    value = c.operand(1, source, c.fake.dtype)
    if list(c.fake_of(1).shape) == list(c.fake.shape):
        return value
    return c.op("Expand", value, c.op("Shape", destination))


@lowers("aten.repeat.default")
def _repeat(c: LoweringContext, x: ir.Value, repeats: Sequence[Any]) -> ir.Value:
    missing = len(repeats) - c.fake_of(0).dim()
    if missing:
        x = c.op("Unsqueeze", x, c.ints(*range(missing)))
    return c.op("Tile", x, c.exact_shape(repeats))


@lowers("aten.repeat_interleave.self_int")
def _repeat_interleave(
    c: LoweringContext, x: ir.Value, repeats: int, dim: int | None = None, output_size: Any = None
) -> ir.Value:
    fake = c.fake_of(0)
    if dim is None:
        x, axis, rank = c.op("Reshape", x, c.ints(-1)), 0, 1
    else:
        axis, rank = dim % fake.dim(), fake.dim()
    column = c.op("Unsqueeze", x, c.ints(axis + 1))
    ones = [1] * (rank + 1)
    ones[axis + 1] = repeats
    expanded = c.op("Expand", column, c.ints(*ones))
    # 0 copies the input's size at the same place, so only sizes before the axis may use it.
    size = fake.shape[axis] if dim is not None else fake.numel()
    merged = size * repeats if isinstance(size, int) else -1
    known = [
        s if isinstance(s, int) else (0 if i < axis else -1) for i, s in enumerate(c.fake.shape)
    ]
    known[axis] = merged
    return c.op("Reshape", expanded, c.ints(*known))


@lowers("aten.unsqueeze.default")
def _unsqueeze(c: LoweringContext, x: ir.Value, dim: int) -> ir.Value:
    return c.op("Unsqueeze", x, c.ints(dim % c.fake.dim()))


@lowers("aten.squeeze.default")
def _squeeze_all(c: LoweringContext, x: ir.Value) -> ir.Value:
    ones = [i for i, size in enumerate(c.fake_of(0).shape) if isinstance(size, int) and size == 1]
    return c.op("Squeeze", x, c.ints(*ones)) if ones else x


@lowers("aten.squeeze.dim", "aten.squeeze.dims")
def _squeeze(c: LoweringContext, x: ir.Value, dims: Any) -> ir.Value:
    fake = c.fake_of(0)
    wanted = [d % fake.dim() for d in (dims if isinstance(dims, Sequence) else [dims])]
    ones = [d for d in wanted if isinstance(fake.shape[d], int) and fake.shape[d] == 1]
    return c.op("Squeeze", x, c.ints(*ones)) if ones else x


@lowers("aten.transpose.int")
def _transpose(c: LoweringContext, x: ir.Value, a: int, b: int) -> ir.Value:
    order = list(range(c.fake.dim()))
    order[a], order[b] = order[b], order[a]
    return c.op("Transpose", x, perm=order)


@lowers("aten.t.default")
def _t(c: LoweringContext, x: ir.Value) -> ir.Value:
    return c.op("Transpose", x) if c.fake.dim() == 2 else x


@lowers("aten.mT.default")
def _matrix_transpose(c: LoweringContext, x: ir.Value) -> ir.Value:
    order = list(range(c.fake.dim()))
    return c.op("Transpose", x, perm=[*order[:-2], order[-1], order[-2]])


@lowers("aten.permute.default")
def _permute(c: LoweringContext, x: ir.Value, dims: Sequence[int]) -> ir.Value:
    return c.op("Transpose", x, perm=[d % len(dims) for d in dims])


@lowers("aten.cat.default", "aten.concat.default")
def _cat(c: LoweringContext, tensors: Sequence[ir.Value], dim: int = 0) -> ir.Value:
    argument: Any = c.node.args[0]
    dtype = c.fake.dtype
    parts = [
        x if node.meta["val"].dtype == dtype else c.cast(x, dtype)
        for x, node in zip(tensors, argument, strict=True)
    ]
    return c.op("Concat", *parts, axis=dim)


@lowers("aten.stack.default")
def _stack(c: LoweringContext, tensors: Sequence[ir.Value], dim: int = 0) -> ir.Value:
    axis = dim % c.fake.dim()
    columns = [c.op("Unsqueeze", x, c.ints(axis)) for x in tensors]
    return c.op("Concat", *columns, axis=axis)


def _split_sizes(
    c: LoweringContext, x: ir.Value, sizes: list[int], dim: int
) -> tuple[ir.Value, ...]:
    return c.builder.nodes_of("Split", [x, c.ints(*sizes)], len(sizes), axis=dim)


@lowers("aten.split.Tensor", "aten.split_with_sizes.default", "aten.chunk.default")
def _split(c: LoweringContext, x: ir.Value, _: Any, dim: int = 0) -> tuple[ir.Value, ...]:
    return _split_sizes(c, x, [int(part.shape[dim]) for part in c.node.meta["val"]], dim)


@lowers("aten.unbind.int")
def _unbind(c: LoweringContext, x: ir.Value, dim: int = 0) -> tuple[ir.Value, ...]:
    count = int(c.fake_of(0).shape[dim])
    parts = _split_sizes(c, x, [1] * count, dim) if count > 1 else (x,)
    return tuple(c.op("Squeeze", part, c.ints(dim)) for part in parts)


@lowers("aten.slice.Tensor")
def _slice(
    c: LoweringContext, x: ir.Value, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> ir.Value:
    whole = not isinstance(start, ir.Value) and not start and step == 1
    if whole and (end is None or (isinstance(end, int) and end >= _END)):
        return x
    first, last = c.size(0 if start is None else start), c.size(_END if end is None else end)
    return c.op("Slice", x, first, last, c.ints(dim), c.ints(step))


@lowers("aten.select.int")
def _select(c: LoweringContext, x: ir.Value, dim: int, index: Any) -> ir.Value:
    if c.fake_of(0).shape[dim] == 1:
        return c.op("Squeeze", x, c.ints(dim))
    if isinstance(index, ir.Value):
        return c.op("Gather", x, c.op("Squeeze", index, c.ints(0)), axis=dim)
    return c.op("Gather", x, c.builder.constant(int(index), np.int64), axis=dim)


@lowers("aten.diff.default")
def _diff(
    c: LoweringContext,
    x: ir.Value,
    n: int = 1,
    dim: int = -1,
    prepend: Any = None,
    append: Any = None,
) -> ir.Value:
    parts = [part for part in (prepend, x, append) if part is not None]
    value = c.op("Concat", *parts, axis=dim) if len(parts) > 1 else x
    for _ in range(n):
        later = c.op("Slice", value, c.ints(1), c.ints(_END), c.ints(dim))
        earlier = c.op("Slice", value, c.ints(0), c.ints(-1), c.ints(dim))
        value = c.op("Sub", later, earlier)
    return value
