"""Arithmetic, comparisons, activations, casts and reductions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import onnx_ir as ir
import torch

from octavo.backends.onnx_lowering.lowering import LoweringContext, lowers

_UNARY = {
    "aten.abs.default": "Abs",
    "aten.ceil.default": "Ceil",
    "aten.cos.default": "Cos",
    "aten.erf.default": "Erf",
    "aten.exp.default": "Exp",
    "aten.floor.default": "Floor",
    "aten.log.default": "Log",
    "aten.neg.default": "Neg",
    "aten.reciprocal.default": "Reciprocal",
    "aten.relu.default": "Relu",
    "aten.round.default": "Round",
    "aten.sigmoid.default": "Sigmoid",
    "aten.sin.default": "Sin",
    "aten.softplus.default": "Softplus",
    "aten.sqrt.default": "Sqrt",
    "aten.tanh.default": "Tanh",
}
_ARITHMETIC = {
    "aten.div": "Div",
    "aten.mul": "Mul",
    "aten.maximum": "Max",
    "aten.minimum": "Min",
}
_COMPARISONS = {
    "aten.eq": "Equal",
    "aten.ge": "GreaterOrEqual",
    "aten.gt": "Greater",
    "aten.le": "LessOrEqual",
    "aten.lt": "Less",
}


def _unary(op_type: str) -> Any:
    def rule(c: LoweringContext, x: ir.Value) -> ir.Value:
        return c.op(op_type, c.operand(0, x, c.fake.dtype))

    return rule


def _binary(op_type: str) -> Any:
    def rule(c: LoweringContext, a: Any, b: Any) -> ir.Value:
        dtype = c.fake.dtype
        return c.op(op_type, c.operand(0, a, dtype), c.operand(1, b, dtype))

    return rule


def _comparison(op_type: str) -> Any:
    def rule(c: LoweringContext, a: Any, b: Any) -> ir.Value:
        return c.op(op_type, *_common(c, a, b))

    return rule


def _common(c: LoweringContext, a: Any, b: Any) -> tuple[ir.Value, ir.Value]:
    """Both operands of a comparison in the dtype that torch compares in."""
    first, second = (
        argument.meta["val"] if isinstance(argument, torch.fx.Node) else argument
        for argument in cast("tuple[Any, Any]", c.node.args[:2])
    )
    dtype = torch.result_type(first, second)
    return c.operand(0, a, dtype), c.operand(1, b, dtype)


for _target, _op_type in _UNARY.items():
    lowers(_target)(_unary(_op_type))
for _target, _op_type in _ARITHMETIC.items():
    _overloads = ("default",) if _target.endswith("imum") else ("Tensor", "Scalar")
    lowers(*[f"{_target}.{overload}" for overload in _overloads])(_binary(_op_type))
for _target, _op_type in _COMPARISONS.items():
    lowers(f"{_target}.Tensor", f"{_target}.Scalar")(_comparison(_op_type))
lowers("aten.max.other")(_binary("Max"))
lowers("aten.min.other")(_binary("Min"))


@lowers("aten.add.Tensor", "aten.add.Scalar")
def _add(c: LoweringContext, a: Any, b: Any, alpha: float = 1) -> ir.Value:
    return _scaled(c, "Add", a, b, alpha)


@lowers("aten.sub.Tensor", "aten.sub.Scalar")
def _sub(c: LoweringContext, a: Any, b: Any, alpha: float = 1) -> ir.Value:
    return _scaled(c, "Sub", a, b, alpha)


def _scaled(c: LoweringContext, op_type: str, a: Any, b: Any, alpha: float) -> ir.Value:
    dtype = c.fake.dtype
    second = c.operand(1, b, dtype)
    if alpha != 1:
        second = c.op("Mul", second, c.scalar(alpha, dtype))
    return c.op(op_type, c.operand(0, a, dtype), second)


@lowers("aten.rsub.Scalar")
def _rsub(c: LoweringContext, a: Any, b: Any, alpha: float = 1) -> ir.Value:
    dtype = c.fake.dtype
    first = c.operand(0, a, dtype)
    if alpha != 1:
        first = c.op("Mul", first, c.scalar(alpha, dtype))
    return c.op("Sub", c.operand(1, b, dtype), first)


@lowers("aten.div.Tensor_mode", "aten.floor_divide.default", "aten.floor_divide.Scalar")
def _div_mode(c: LoweringContext, a: Any, b: Any, rounding_mode: str | None = "floor") -> ir.Value:
    dtype = c.fake.dtype
    dividend, divisor = c.operand(0, a, dtype), c.operand(1, b, dtype)
    if rounding_mode == "floor" and not dtype.is_floating_point:
        # ONNX divides integers towards zero: without the remainder there is nothing to round.
        dividend = c.op("Sub", dividend, c.op("Mod", dividend, divisor))
    quotient = c.op("Div", dividend, divisor)
    if rounding_mode is None or not dtype.is_floating_point:
        return quotient
    if rounding_mode == "floor":
        return c.op("Floor", quotient)
    return c.op("Mul", c.op("Sign", quotient), c.op("Floor", c.op("Abs", quotient)))


@lowers("aten.remainder.Scalar", "aten.remainder.Tensor")
def _remainder(c: LoweringContext, a: Any, b: Any) -> ir.Value:
    """The result has the divisor's sign, as in Python."""
    dtype = c.fake.dtype
    dividend, divisor = c.operand(0, a, dtype), c.operand(1, b, dtype)
    if not dtype.is_floating_point:
        return c.op("Mod", dividend, divisor)
    whole = c.op("Floor", c.op("Div", dividend, divisor))
    return c.op("Sub", dividend, c.op("Mul", whole, divisor))


@lowers("aten.ne.Tensor", "aten.ne.Scalar")
def _ne(c: LoweringContext, a: Any, b: Any) -> ir.Value:
    return c.op("Not", c.op("Equal", *_common(c, a, b)))


@lowers("aten.logical_not.default", "aten.bitwise_not.default")
def _not(c: LoweringContext, x: ir.Value) -> ir.Value:
    return c.op("Not" if c.fake.dtype == torch.bool else "BitwiseNot", x)


@lowers("aten.logical_and.default", "aten.bitwise_and.Tensor", "aten.__and__.Tensor")
def _and(c: LoweringContext, a: ir.Value, b: ir.Value) -> ir.Value:
    return c.op("And" if c.fake.dtype == torch.bool else "BitwiseAnd", a, b)


@lowers("aten.logical_or.default", "aten.bitwise_or.Tensor", "aten.__or__.Tensor")
def _or(c: LoweringContext, a: ir.Value, b: ir.Value) -> ir.Value:
    return c.op("Or" if c.fake.dtype == torch.bool else "BitwiseOr", a, b)


@lowers("aten.rsqrt.default")
def _rsqrt(c: LoweringContext, x: ir.Value) -> ir.Value:
    return c.op("Reciprocal", c.op("Sqrt", x))


@lowers("aten.square.default")
def _square(c: LoweringContext, x: ir.Value) -> ir.Value:
    return c.op("Mul", x, x)


@lowers("aten.pow.Tensor_Scalar", "aten.pow.Tensor_Tensor", "aten.pow.Scalar")
def _pow(c: LoweringContext, base: Any, exponent: Any) -> ir.Value:
    dtype = c.fake.dtype
    first = c.operand(0, base, dtype)
    if exponent == 2:
        return c.op("Mul", first, first)
    return c.op("Pow", first, c.operand(1, exponent, dtype))


@lowers("aten.expm1.default")
def _expm1(c: LoweringContext, x: ir.Value) -> ir.Value:
    return c.op("Sub", c.op("Exp", x), c.scalar(1.0, c.fake.dtype))


@lowers("aten.silu.default")
def _silu(c: LoweringContext, x: ir.Value) -> ir.Value:
    return c.op("Mul", x, c.op("Sigmoid", x))


@lowers("aten.gelu.default")
def _gelu(c: LoweringContext, x: ir.Value, approximate: str = "none") -> ir.Value:
    return c.op("Gelu", x, approximate=approximate)


@lowers("aten.clamp.default", "aten.clamp_min.default")
def _clamp(
    c: LoweringContext, x: ir.Value, low: Any = None, high: Any = None, **named: Any
) -> ir.Value:
    low, high = named.get("min", low), named.get("max", high)
    bounds = [None if bound is None else c.scalar(bound, c.fake.dtype) for bound in (low, high)]
    return c.op("Clip", x, *bounds)


@lowers("aten.clamp_max.default")
def _clamp_max(c: LoweringContext, x: ir.Value, high: Any) -> ir.Value:
    return c.op("Clip", x, None, c.scalar(high, c.fake.dtype))


@lowers("aten.clamp.Tensor")
def _clamp_tensor(
    c: LoweringContext, x: ir.Value, low: Any = None, high: Any = None, **named: Any
) -> ir.Value:
    low, high = named.get("min", low), named.get("max", high)
    if low is not None:
        x = c.op("Max", x, cast(ir.Value, low))
    return x if high is None else c.op("Min", x, cast(ir.Value, high))


@lowers("aten.where.self", "aten.where.ScalarSelf", "aten.where.ScalarOther", "aten.where.Scalar")
def _where(c: LoweringContext, condition: ir.Value, a: Any, b: Any) -> ir.Value:
    dtype = c.fake.dtype
    return c.op("Where", condition, c.operand(1, a, dtype), c.operand(2, b, dtype))


@lowers("aten.masked_fill.Scalar", "aten.masked_fill.Tensor")
def _masked_fill(c: LoweringContext, x: ir.Value, mask: ir.Value, value: Any) -> ir.Value:
    return c.op("Where", mask, c.operand(2, value, c.fake.dtype), x)


@lowers("aten.to.dtype", "aten.to.dtype_layout", "aten.to.device", "aten._to_copy.default")
@lowers("aten.type_as.default")
def _to(c: LoweringContext, x: ir.Value, *_: Any, **__: Any) -> ir.Value:
    source, dtype = c.fake_of(0).dtype, c.fake.dtype
    return x if source == dtype else c.cast(x, dtype)


def _axes(c: LoweringContext, dims: Any) -> ir.Value | None:
    if dims is None or dims == []:
        return None
    return c.ints(*(dims if isinstance(dims, Sequence) else [dims]))


@lowers("aten.mean.dim", "aten.mean.default")
def _mean(
    c: LoweringContext, x: ir.Value, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> ir.Value:
    value = c.operand(0, x, c.fake.dtype)
    return c.op("ReduceMean", value, _axes(c, dim), keepdims=int(keepdim))


@lowers("aten.sum.dim_IntList", "aten.sum.default")
def _sum(
    c: LoweringContext, x: ir.Value, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> ir.Value:
    value = c.operand(0, x, c.fake.dtype)
    return c.op("ReduceSum", value, _axes(c, dim), keepdims=int(keepdim))


@lowers("aten.amax.default")
def _amax(c: LoweringContext, x: ir.Value, dim: Any = None, keepdim: bool = False) -> ir.Value:
    return c.op("ReduceMax", x, _axes(c, dim), keepdims=int(keepdim))


@lowers("aten.max.dim")
def _max_dim(
    c: LoweringContext, x: ir.Value, dim: int, keepdim: bool = False
) -> tuple[ir.Value, ir.Value]:
    top = c.op("ReduceMax", x, c.ints(dim), keepdims=int(keepdim))
    return top, c.op("ArgMax", x, axis=dim, keepdims=int(keepdim))


@lowers("aten.softmax.int")
def _softmax(c: LoweringContext, x: ir.Value, dim: int, *_: Any, **__: Any) -> ir.Value:
    return c.op("Softmax", c.operand(0, x, c.fake.dtype), axis=dim)


@lowers("aten.cumsum.default")
def _cumsum(c: LoweringContext, x: ir.Value, dim: int, dtype: Any = None) -> ir.Value:
    return c.op("CumSum", c.operand(0, x, c.fake.dtype), c.builder.constant(dim, np.int64))
