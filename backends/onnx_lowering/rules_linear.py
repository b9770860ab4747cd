"""Matrix products and norms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from octavo.backends.onnx_lowering.lowering import LoweringContext, lowers
from octavo.graphs.ops.linear import SCHEMA as LINEAR
from octavo.graphs.ops.schema import DOMAIN


@lowers("aten.linear.default")
def _linear(
    c: LoweringContext, x: ir.Value, weight: ir.Value, bias: ir.Value | None = None
) -> ir.Value:
    fake = c.fake_of(0)
    columns = int(c.fake.shape[-1])
    rows = x
    if fake.dim() != 2:
        rows = c.op("Reshape", x, c.ints(-1, int(fake.shape[-1])))
    product = _packed_linear(c, rows, weight, bias, columns, transposed=False)
    if product is None:
        # The weight as the checkpoint has it, and shared if it is tied.
        product = c.op("Gemm", rows, weight, bias, transB=1)
    if fake.dim() == 2:
        return product
    leading = c.op("Shape", x, start=0, end=-1)
    return c.op("Reshape", product, c.op("Concat", leading, c.ints(columns), axis=0))


@lowers("aten.addmm.default")
def _addmm(
    c: LoweringContext,
    bias: ir.Value,
    a: ir.Value,
    b: ir.Value,
    beta: float = 1,
    alpha: float = 1,
) -> ir.Value:
    product = None
    if alpha == beta == 1 and c.fake_of(0).dim() == 1:
        product = _packed_linear(c, a, b, bias, int(c.fake.shape[1]), transposed=True)
    return product or c.op("Gemm", a, b, bias, alpha=float(alpha), beta=float(beta))


def _packed_linear(
    c: LoweringContext,
    rows: ir.Value,
    weight: ir.Value,
    bias: ir.Value | None,
    columns: int,
    *,
    transposed: bool,
) -> ir.Value | None:
    """`octavo::Linear` where the backend has it and the weight is a parameter."""
    packed = c.builder.packed(weight, transposed=transposed) if c.layouts.packed_linear else None
    if packed is None:
        return None
    none = c.builder.constant([], np.float32)
    no_residual = c.builder.constant(np.zeros((0, 0)), np.float32)
    return c.op(
        LINEAR.onnx_name,
        rows,
        packed,
        none if bias is None else bias,
        no_residual,
        domain=DOMAIN,
        columns=columns,
    )


@lowers("aten.matmul.default", "aten.mm.default", "aten.bmm.default")
def _matmul(c: LoweringContext, a: ir.Value, b: ir.Value) -> ir.Value:
    return c.op("MatMul", a, b)


@lowers("aten.layer_norm.default")
def _layer_norm(
    c: LoweringContext,
    x: ir.Value,
    normalized_shape: Sequence[int],
    weight: ir.Value | None = None,
    bias: ir.Value | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    if weight is None:
        ones = torch.ones(list(normalized_shape), dtype=c.fake.dtype)
        weight = c.builder.weight(f"{c.node.name}.ones", ones)
    axis = -len(normalized_shape)
    return c.op("LayerNormalization", x, weight, bias, axis=axis, epsilon=float(eps))


@lowers("aten.rms_norm.default")
def _rms_norm(
    c: LoweringContext,
    x: ir.Value,
    normalized_shape: Sequence[int],
    weight: ir.Value | None = None,
    eps: float | None = None,
) -> ir.Value:
    dtype = c.fake.dtype
    axes = c.ints(*range(-len(normalized_shape), 0))
    epsilon = torch.finfo(dtype).eps if eps is None else eps
    mean = c.op("ReduceMean", c.op("Mul", x, x), axes, keepdims=1)
    root = c.op("Sqrt", c.op("Add", mean, c.scalar(epsilon, dtype)))
    normalised = c.op("Mul", x, c.op("Reciprocal", root))
    return normalised if weight is None else c.op("Mul", normalised, weight)
