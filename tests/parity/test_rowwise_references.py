"""Norms, activations and quantisation: torch references and ONNX bodies against float64."""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnx import helper
from onnx.reference import ReferenceEvaluator

from octavo.backends.onnx_lowering.functions import bodies_of
from octavo.graphs.ops.activation import ACTIVATE, ACTIVATE_QUANTIZE, Function
from octavo.graphs.ops.activation_torch import activate
from octavo.graphs.ops.linear_torch import linear_residual
from octavo.graphs.ops.norm import NORM, NORM_QUANTIZE
from octavo.graphs.ops.norm_torch import norm
from octavo.graphs.ops.quantization import SCHEMA as QUANTIZE
from octavo.graphs.ops.quantization_torch import quantize
from octavo.graphs.ops.schema import DOMAIN, OperatorSchema

Array = NDArray[Any]

TYPES = {
    "float32": onnx.TensorProto.FLOAT,
    "int8": onnx.TensorProto.INT8,
    "int32": onnx.TensorProto.INT32,
}


def run_body(schema: OperatorSchema, *operands: Array, **attributes: float) -> list[Array]:
    """What the ONNX function body computes, with the bodies that it calls."""
    inputs = [operand.name for operand in schema.inputs]
    outputs = [operand.name for operand in schema.outputs]
    node = helper.make_node(schema.onnx_name, inputs, outputs, domain=DOMAIN)
    node.attribute.extend(helper.make_attribute(*item) for item in attributes.items())
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    graph = helper.make_graph(
        [node],
        "body",
        [
            helper.make_tensor_value_info(name, TYPES["float32"], operand.shape)
            for name, operand in zip(inputs, operands, strict=True)
        ],
        [
            helper.make_tensor_value_info(operand.name, TYPES[operand.type_group], [None, None])
            for operand in schema.outputs
        ],
    )
    # The evaluator wants what is called before what calls.
    functions = sorted(
        bodies_of([schema.onnx_name]), key=lambda body: any(n.domain == DOMAIN for n in body.node)
    )
    model = helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=10)
    onnx.checker.check_model(model)
    feeds = dict(zip(inputs, operands, strict=True))
    return cast("list[Array]", ReferenceEvaluator(model).run(None, feeds))


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def tensors(*arrays: Array) -> list[torch.Tensor]:
    return [torch.from_numpy(array) for array in arrays]


def quantized_both_ways(rows: Array) -> list[list[Array]]:
    reference = [x.numpy() for x in quantize(torch.from_numpy(rows))]
    return [reference, run_body(QUANTIZE, rows)]


def test_values_are_rounded_halves_to_even() -> None:
    """The largest magnitude 127 makes the scale 1."""
    row = np.zeros((1, 64), np.float32)
    row[0, :8] = [127, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, -126.6]
    for quantized, scales, sums in quantized_both_ways(row):
        assert quantized[0, :8].tolist() == [127, 0, 2, 2, 0, -2, 126, -127]
        assert scales.tolist() == [[1.0, 0.0]]
        assert sums.tolist() == [[127 + 2 + 2 - 2 + 126 - 127, 0]]


def test_every_group_of_32_has_its_scale_and_the_depth_is_filled_up() -> None:
    row = np.zeros((2, 70), np.float32)
    row[0, [3, 31]] = 254, -2
    row[0, [40, 63]] = -12.7, 0.26
    row[0, [64, 69]] = -0.127, 0.001
    for quantized, scales, sums in quantized_both_ways(row):
        assert quantized.shape == (2, 96)
        assert quantized.dtype == np.int8
        assert {int(i): int(quantized[0, i]) for i in np.flatnonzero(quantized[0])} == {
            3: 127,
            31: -1,
            40: -127,
            63: 3,
            64: -127,
            69: 1,
        }
        np.testing.assert_allclose(scales[0], [2.0, 0.1, 0.001], rtol=1e-6)
        assert scales[1].tolist() == [0.0, 0.0, 0.0]
        assert sums.dtype == np.int32
        assert sums.tolist() == [[126, -124, -126], [0, 0, 0]]


def test_denormals_and_no_rows_are_quantised() -> None:
    """127 / 1e-40 is no float32."""
    tiny = np.zeros((1, 64), np.float32)
    tiny[0, 5] = 1e-40
    for quantized, _, sums in quantized_both_ways(tiny):
        assert np.count_nonzero(quantized) <= 1
        assert sums[0].tolist() == [int(quantized.sum()), 0]
    for quantized, scales, sums in quantized_both_ways(np.zeros((0, 70), np.float32)):
        assert [x.shape for x in (quantized, scales, sums)] == [(0, 96), (0, 3), (0, 3)]


def expected_norm(
    rows: Array, residual: Array, weight: Array, bias: Array, epsilon: float, centered: int
) -> tuple[Array, Array]:
    x = rows.astype(np.float64)
    if residual.size:
        x = x + residual
    shifted = x - x.mean(-1, keepdims=True) if centered else x
    output = shifted / np.sqrt((shifted**2).mean(-1, keepdims=True) + epsilon)
    output = output * (weight if weight.size else 1.0) + (bias if bias.size else 0.0)
    return output, x if residual.size else x[:0]


NOTHING = np.zeros(0, np.float32)
NO_ROWS = np.zeros((0, 0), np.float32)


@pytest.mark.parametrize("centered", [0, 1])
@pytest.mark.parametrize("given", ["nothing", "weight", "weight, bias", "residual, weight, bias"])
def test_norms(centered: int, given: str) -> None:
    epsilon = 1e-2
    rows = 3 + normal(5, 48)
    residual = normal(5, 48, seed=1) if "residual" in given else NO_ROWS
    weight = normal(48, seed=2) if "weight" in given else NOTHING
    bias = normal(48, seed=3) if "bias" in given else NOTHING
    operands = (rows, residual, weight, bias)
    expected = expected_norm(*operands, epsilon, centered)
    x, y, w, b = tensors(*operands)
    reference = [value.numpy() for value in norm(x, y, w, b, epsilon, centered)]
    body = run_body(NORM, *operands, epsilon=epsilon, centered=centered)
    for found in (reference, body):
        for value, wanted in zip(found, expected, strict=True):
            assert value.shape == wanted.shape
            np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-5)


def expected_activation(x: Array, function: Function) -> Array:
    y = x.astype(np.float64)
    erf, tanh = np.vectorize(math.erf), np.tanh
    expected: dict[Function, Array] = {
        Function.SILU: y / (1 + np.exp(-y)),
        Function.GELU: y / 2 * (1 + erf(y / np.sqrt(2))),
        Function.GELU_TANH: y / 2 * (1 + tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3))),
        Function.RELU: np.where(y > 0, y, 0),
        Function.RELU_SQUARED: np.where(y > 0, y * y, 0),
    }
    return expected[function]


@pytest.mark.parametrize("function", Function)
@pytest.mark.parametrize("gated", [0, 1])
def test_activations(function: Function, gated: int) -> None:
    rows = 3 * normal(4, 30)
    expected = expected_activation(rows[:, :15] if gated else rows, function)
    if gated:
        expected = expected * rows[:, 15:]
    reference = activate(torch.from_numpy(rows), function, gated).numpy()
    (body,) = run_body(ACTIVATE, rows, function=int(function), gated=gated)
    np.testing.assert_allclose(reference, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(body, expected, rtol=1e-5, atol=1e-5)


def test_quantising_bodies_are_the_plain_ones_then_quantize() -> None:
    rows, residual, weight = normal(3, 96), normal(3, 96, seed=1), normal(96, seed=2)
    operands = (rows, residual, weight, NOTHING)
    output, total = run_body(NORM, *operands, epsilon=1e-5, centered=0)
    expected = [*run_body(QUANTIZE, output), total]
    found = run_body(NORM_QUANTIZE, *operands, epsilon=1e-5, centered=0)
    attributes = {"function": int(Function.SILU), "gated": 1}
    expected += run_body(QUANTIZE, *run_body(ACTIVATE, rows, **attributes))
    found += run_body(ACTIVATE_QUANTIZE, rows, **attributes)
    for value, wanted in zip(found, expected, strict=True):
        np.testing.assert_array_equal(value, wanted)


@pytest.mark.parametrize("biased", [False, True])
def test_linear_layers_with_a_residual(biased: bool) -> None:
    rows, weight, residual = normal(3, 8), normal(5, 8, seed=1), normal(3, 5, seed=2)
    bias = normal(5, seed=3) if biased else NOTHING
    expected = rows.astype(np.float64) @ weight.T + residual + (bias if biased else 0.0)
    found = linear_residual(*tensors(rows, weight, bias, residual))
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-5)
