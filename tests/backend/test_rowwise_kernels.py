"""Norms, activations and quantisation against numpy, and bit for bit against themselves."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper

from octavo.backends import kernels
from octavo.graphs.ops.activation import ACTIVATE, ACTIVATE_QUANTIZE, Function
from octavo.graphs.ops.norm import NORM, NORM_QUANTIZE
from octavo.graphs.ops.quantization import SCHEMA as QUANTIZE
from octavo.graphs.ops.schema import DOMAIN, OPSET_VERSION, OperatorSchema
from tests.backend.kernel_variants import VARIANTS, library_of, selected

Array = NDArray[Any]
NONE = np.zeros(0, np.float32)
NO_RESIDUAL = np.zeros((0, 0), np.float32)
EPSILON = 1e-5
TYPES = {"float32": TensorProto.FLOAT, "int8": TensorProto.INT8, "int32": TensorProto.INT32}


def random(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@cache
def session(
    schema: OperatorSchema, attributes: tuple[tuple[str, Any], ...], threads: int, variant: str
) -> onnxruntime.InferenceSession:
    inputs = [helper.make_tensor_value_info(x.name, TensorProto.FLOAT, None) for x in schema.inputs]
    outputs = [
        helper.make_tensor_value_info(x.name, TYPES[x.type_group], None) for x in schema.outputs
    ]
    names = ([x.name for x in schema.inputs], [x.name for x in schema.outputs])
    node = helper.make_node(schema.onnx_name, *names, domain=DOMAIN, **dict(attributes))
    model = helper.make_model(
        helper.make_graph([node], "rowwise", inputs, outputs),
        opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, OPSET_VERSION)],
        ir_version=10,
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    library = library_of(variant) if variant else kernels.library_path()
    options.register_custom_ops_library(str(library))
    with selected(variant or kernels.instruction_set()):
        return onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )


def run(
    schema: OperatorSchema, *inputs: Array, threads: int = 1, variant: str = "", **attributes: Any
) -> list[Array]:
    feeds = dict(zip((x.name for x in schema.inputs), inputs, strict=True))
    chosen = tuple(sorted(attributes.items()))
    return list(session(schema, chosen, threads, variant).run(None, feeds))


def quantized(x: Array) -> tuple[Array, Array, Array]:
    """By the definition in the schema, in float32 where it says so."""
    groups = -(-x.shape[1] // 32)
    padded = np.zeros((len(x), groups, 32), np.float32)
    padded.reshape(len(x), groups * 32)[:, : x.shape[1]] = x
    largest = np.abs(padded).max(axis=2, keepdims=True)
    factor = np.divide(np.float32(127), largest, where=largest > 0, out=np.zeros_like(largest))
    values = np.clip(np.rint(padded * factor), -127, 127).astype(np.int8)
    sums = values.sum(axis=2, dtype=np.int32)
    return values.reshape(len(x), groups * 32), largest[:, :, 0] / np.float32(127), sums


def assert_quantized(outputs: list[Array], x: Array) -> None:
    for output, wanted in zip(outputs, quantized(x), strict=False):
        assert output.dtype == wanted.dtype
        np.testing.assert_array_equal(output, wanted)


def normed(x: Array, weight: Array, bias: Array, centered: int) -> NDArray[np.float64]:
    y: NDArray[np.float64] = x.astype(np.float64)
    if centered:
        y = y - y.mean(axis=1, keepdims=True)
    y = y / np.sqrt((y * y).mean(axis=1, keepdims=True) + EPSILON)
    y = y * weight.astype(np.float64) if weight.size else y
    return y + bias.astype(np.float64) if bias.size else y


def activated(x: Array, function: Function) -> NDArray[np.float64]:
    y = x.astype(np.float64)
    result: NDArray[np.float64]
    match function:
        case Function.SILU:
            result = y / (1 + np.exp(np.minimum(-y, 700)))
        case Function.GELU:
            result = y / 2 * (1 + np.vectorize(math.erf, otypes=[np.float64])(y / math.sqrt(2)))
        case Function.GELU_TANH:
            result = y / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        case Function.RELU:
            result = np.maximum(y, 0)
        case Function.RELU_SQUARED:
            result = np.maximum(y, 0) ** 2
    return result


SHAPES = [
    *[(0, 64), (1, 1), (2, 31), (3, 32), (4, 33), (2, 63), (3, 64), (5, 65), (2, 96), (4, 100)],
    *[(1, 576), (7, 1536), (70, 513)],
]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_quantised(shape: tuple[int, int], variant: str) -> None:
    x = random(*shape)
    assert_quantized(run(QUANTIZE, x, threads=2, variant=variant), x)


@pytest.mark.parametrize("variant", VARIANTS)
def test_halves_go_to_even_and_nothing_leaves_the_range(variant: str) -> None:
    x = np.zeros((6, 128), np.float32)
    x[0, 0], x[0, 1:5] = 127, [0.5, 1.5, -2.5, 126.5]
    x[1, 32:] = -3.5  # the group before it is zero
    x[2] = np.float32(2) ** 127
    x[3, 5], x[3, 6] = 2**-149, -(2**-149)  # 127 / m is infinite
    x[4] = random(128) * np.float32(1e-36)
    x[5] = random(128, seed=1) * np.float32(1e36)
    values, scales, sums = run(QUANTIZE, x, variant=variant)
    assert values[0, :5].tolist() == [127, 0, 2, -2, 126]
    assert scales[0].tolist() == [1, 0, 0, 0]
    assert sums[0].tolist() == [127 + 2 - 2 + 126, 0, 0, 0]
    assert (values[1, :32] == 0).all()
    assert (values[1, 32:] == -127).all()
    assert scales[1].tolist() == [0, *[np.float32(3.5) / np.float32(127)] * 3]
    assert sums[1].tolist() == [0, -127 * 32, -127 * 32, -127 * 32]
    assert (values[2] == 127).all()
    assert values[3, 4:8].tolist() == [0, 127, -127, 0]
    for output, wanted in zip((values, scales, sums), quantized(x[4:]), strict=True):
        np.testing.assert_array_equal(output[4:], wanted)


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_not_finite_stays_in_its_group_and_stays_visible(variant: str) -> None:
    x = random(4, 192)
    broken = x.copy()
    broken[1, 70], broken[2, 100], broken[2, 130] = np.nan, np.inf, -np.inf
    clean, output = (run(QUANTIZE, rows, variant=variant) for rows in (x, broken))
    for before, after in zip(clean, output, strict=True):
        np.testing.assert_array_equal(before[[0, 3]], after[[0, 3]])
    # By groups of 32: the broken ones are 2 in row 1 (column 70), 3 and 4 in row 2.
    values, scales, sums = (part.reshape(4, 6, -1) for part in output)
    assert np.isnan(scales[1, 2])
    assert np.isinf(scales[2, 3:5]).all()
    for row, faulty in ((1, [2]), (2, [3, 4])):
        assert (values[row, faulty] == 0).all()
        assert (sums[row, faulty] == 0).all()
        others = np.delete(np.arange(6), faulty)
        for before, after in zip(clean, (values, scales, sums), strict=True):
            np.testing.assert_array_equal(before.reshape(4, 6, -1)[row, others], after[row, others])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("centered", [0, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_norms(shape: tuple[int, int], centered: int, variant: str) -> None:
    rows, depth = shape
    weight, bias = random(depth, seed=2), random(depth, seed=3)
    options: dict[str, Any] = {"epsilon": EPSILON, "centered": centered, "variant": variant}
    for w in (weight, NONE):
        for b in (bias, NONE):
            for residual in (random(rows, depth, seed=1), NO_RESIDUAL):
                x = random(rows, depth) * 3 + 1
                output, stream = run(NORM, x, residual, w, b, threads=2, **options)
                total = x + residual if residual.size else x
                if residual.size:
                    np.testing.assert_array_equal(stream, total)
                else:
                    assert stream.shape == (0, depth)
                wanted = normed(total, w, b, centered)
                np.testing.assert_allclose(output, wanted, atol=2e-6, rtol=2e-6)
                outputs = run(NORM_QUANTIZE, x, residual, w, b, threads=2, **options)
                assert_quantized(outputs, output)
                np.testing.assert_array_equal(outputs[3], stream)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("function", Function)
@pytest.mark.parametrize("gated", [0, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_activations(shape: tuple[int, int], gated: int, function: Function, variant: str) -> None:
    rows, depth = shape
    x = random(rows, depth * (1 + gated)) * 3
    options: dict[str, Any] = {"function": function.value, "gated": gated, "variant": variant}
    (output,) = run(ACTIVATE, x, threads=2, **options)
    wanted = activated(x[:, :depth], function)
    if gated:
        wanted = wanted * x[:, depth:]
    np.testing.assert_allclose(output, wanted, atol=1e-6, rtol=1e-6)
    assert_quantized(run(ACTIVATE_QUANTIZE, x, threads=2, **options), output)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("function", Function)
def test_activations_over_their_whole_range(function: Function, variant: str) -> None:
    far = np.array([0.0, -0.0, 1e-30, -1e-30, 30, -30, 1e4, -1e4, 1e15, -1e15])
    x = np.concatenate([np.linspace(-20, 20, 400_000), far]).astype(np.float32)[None]
    (output,) = run(ACTIVATE, x, function=function.value, gated=0, variant=variant)
    # An absolute error near 0, a relative one of a few roundings above 1.
    np.testing.assert_allclose(output, activated(x, function), atol=3e-7, rtol=3e-7)


@pytest.mark.parametrize("function", Function)
def test_a_value_that_is_not_finite_stays_so(function: Function) -> None:
    x = np.array([[np.nan, np.inf, 1.0]], np.float32)
    ((output,),) = run(ACTIVATE, x, function=function.value, gated=0)
    assert np.isnan(output[0])
    assert output[1] == np.inf
    np.testing.assert_allclose(output[2:], activated(x[0, 2:], function), rtol=1e-6)


OPERATIONS: list[tuple[OperatorSchema, dict[str, Any]]] = [
    (QUANTIZE, {}),
    (NORM, {"epsilon": EPSILON, "centered": 0}),
    (NORM_QUANTIZE, {"epsilon": EPSILON, "centered": 1}),
    (ACTIVATE, {"function": Function.GELU.value, "gated": 1}),
    (ACTIVATE_QUANTIZE, {"function": Function.SILU.value, "gated": 0}),
]


def inputs_of(schema: OperatorSchema, x: Array, residual: Array) -> list[Array]:
    if schema in (NORM, NORM_QUANTIZE):
        return [x, residual, random(x.shape[1], seed=2), random(x.shape[1], seed=3)]
    return [x]


@settings(max_examples=40, deadline=None)
@given(
    operation=st.sampled_from(range(len(OPERATIONS))),
    num_rows=st.integers(1, 150),
    depth=st.integers(1, 300).map(lambda half: 2 * half),
    first=st.integers(0, 149),
    threads=st.sampled_from([1, 2, 3]),
    variant=st.sampled_from(["", "portable"]),
)
def test_a_row_has_the_same_bits_in_every_batch(
    operation: int, num_rows: int, depth: int, first: int, threads: int, variant: str
) -> None:
    schema, attributes = OPERATIONS[operation]
    x, residual = random(num_rows, depth), random(num_rows, depth, seed=1)
    first %= num_rows

    def outputs(rows: slice, threads: int) -> list[Array]:
        inputs = inputs_of(schema, x[rows], residual[rows])
        return run(schema, *inputs, threads=threads, variant=variant, **attributes)

    together = outputs(slice(None), threads)
    for rows in (slice(first, first + 1), slice(first, None)):
        for apart, whole in zip(outputs(rows, 1), together, strict=True):
            np.testing.assert_array_equal(apart, whole[rows])


@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant != "portable"])
@pytest.mark.parametrize("operation", range(len(OPERATIONS)))
def test_instruction_sets_agree_bit_for_bit(operation: int, variant: str) -> None:
    if kernels.instruction_set() == "portable":
        pytest.skip("this CPU's baseline has no fused multiply-add")
    schema, attributes = OPERATIONS[operation]
    for shape in ((9, 576), (5, 70)):
        inputs = inputs_of(schema, random(*shape), random(*shape, seed=1))
        ours, others = (run(schema, *inputs, variant=v, **attributes) for v in ("", variant))
        for one, other in zip(ours, others, strict=True):
            np.testing.assert_array_equal(one, other)


NORM_ATTRIBUTES = {"epsilon": EPSILON, "centered": 0}


@pytest.mark.parametrize(
    ("schema", "inputs", "attributes", "sentence"),
    [
        (QUANTIZE, [random(2, 3, 4)], {}, "input has 3 dimensions and needs 2"),
        (NORM, [random(2, 8), random(2, 7), NONE, NONE], NORM_ATTRIBUTES, r"residual is \[2, 7\]"),
        (NORM, [random(2, 8), random(1, 8), NONE, NONE], NORM_ATTRIBUTES, r"residual is \[1, 8\]"),
        (NORM, [random(2, 8), NO_RESIDUAL, random(7), NONE], NORM_ATTRIBUTES, "weight has 7"),
        (NORM_QUANTIZE, [random(2, 8), NO_RESIDUAL, NONE, random(9)], NORM_ATTRIBUTES, "bias has"),
        (NORM, [random(2, 8)] * 4, {"epsilon": -1.0, "centered": 0}, "epsilon is -1"),
        (NORM, [random(2, 8)] * 4, {"centered": 0}, "epsilon is nan"),
        (NORM, [random(2, 8)] * 4, {"epsilon": EPSILON, "centered": 2}, "centered is 2"),
        (ACTIVATE, [random(2, 7)], {"function": 0, "gated": 1}, "input has 7 columns"),
        (ACTIVATE, [random(2, 8)], {"function": 5, "gated": 0}, "function is 5"),
        (ACTIVATE_QUANTIZE, [random(2, 8)], {"gated": 0}, "function is -1"),
        (ACTIVATE, [random(2, 8)], {"function": 0, "gated": -1}, "gated is -1"),
    ],
)
def test_wrong_input_is_refused(
    schema: OperatorSchema, inputs: list[Array], attributes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(Exception, match=sentence):
        run(schema, *inputs, **attributes)
