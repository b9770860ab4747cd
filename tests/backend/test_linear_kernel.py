"""The native linear layer against a float64 product, and bit for bit against itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from octavo.backends import kernels
from octavo.graphs.ops import linear_onnx
from octavo.graphs.ops.linear import PANEL, SCHEMA
from octavo.graphs.ops.schema import DOMAIN, OPSET_VERSION
from tests.backend.kernel_variants import VARIANTS, library_of, selected

Array = NDArray[np.float32]
NO_RESIDUAL = np.zeros((0, 0), np.float32)


def random(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def packed(weight: Array) -> Array:
    """[K, N] in panels of 16 columns, by the definition in the schema."""
    depth, columns = weight.shape
    panels = np.zeros((-(-columns // PANEL), depth, PANEL), np.float32)
    for column in range(columns):
        panels[column // PANEL, :, column % PANEL] = weight[:, column]
    return panels


def model(columns: int, *, with_body: bool = False) -> onnx.ModelProto:
    names = [operand.name for operand in SCHEMA.inputs]
    node = helper.make_node(SCHEMA.onnx_name, names, ["output"], domain=DOMAIN, columns=columns)
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names]
    output = helper.make_tensor_value_info("output", TensorProto.FLOAT, None)
    return helper.make_model(
        helper.make_graph([node], "linear", inputs, [output]),
        opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, OPSET_VERSION)],
        functions=[linear_onnx.function()] if with_body else [],
        ir_version=10,
    )


def session(
    columns: int, threads: int = 1, library: Path | None = None
) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    options.register_custom_ops_library(str(library or kernels.library_path()))
    return onnxruntime.InferenceSession(
        model(columns).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def run(
    rows: Array,
    weight: Array,
    bias: Array | None = None,
    residual: Array | None = None,
    *,
    threads: int = 1,
    library: Path | None = None,
) -> Array:
    feeds = {
        "input": rows,
        "weight": packed(weight),
        "bias": np.zeros(0, np.float32) if bias is None else bias,
        "residual": NO_RESIDUAL if residual is None else residual,
    }
    (output,) = session(weight.shape[1], threads, library).run(None, feeds)
    return np.asarray(output)


def expected(rows: Array, weight: Array, bias: Array | None = None) -> NDArray[np.float64]:
    product: NDArray[np.float64] = rows.astype(np.float64) @ weight.astype(np.float64)
    return product if bias is None else product + bias


@pytest.mark.parametrize("num_rows", [0, 1, 2, 5, 8, 12, 13, 31, 97, 200])
@pytest.mark.parametrize(
    ("depth", "columns"), [(1, 1), (64, 16), (100, 33), (300, 130), (513, 7), (1100, 90)]
)
def test_products(num_rows: int, depth: int, columns: int) -> None:
    rows, weight = random(num_rows, depth), random(depth, columns, seed=1)
    output = run(rows, weight, threads=2)
    assert output.shape == (num_rows, columns)
    scale = np.sqrt(depth)
    np.testing.assert_allclose(output, expected(rows, weight), atol=1e-6 * scale * 4, rtol=1e-5)


def test_a_bias_is_added() -> None:
    rows, weight, bias = random(9, 70), random(70, 37, seed=1), random(37, seed=2)
    output = run(rows, weight, bias)
    np.testing.assert_allclose(output, expected(rows, weight, bias), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_rows", [0, 1, 6, 50, 200])
@pytest.mark.parametrize(("depth", "columns"), [(0, 20), (64, 16), (300, 130), (513, 7)])
def test_a_residual_is_added_once_to_the_finished_sum(
    num_rows: int, depth: int, columns: int
) -> None:
    rows, weight, bias = random(num_rows, depth), random(depth, columns), random(columns)
    residual = random(num_rows, columns, seed=3)
    output = run(rows, weight, bias, residual, threads=2)
    np.testing.assert_array_equal(output, run(rows, weight, bias) + residual)


def test_without_depth_the_output_is_the_bias() -> None:
    bias = random(20)
    output = run(random(3, 0), random(0, 20), bias)
    np.testing.assert_array_equal(output, np.stack([bias] * 3))


@settings(max_examples=30, deadline=None)
@given(
    num_rows=st.integers(1, 120),
    depth=st.integers(1, 600),
    columns=st.integers(1, 70),
    first=st.integers(0, 119),
    threads=st.sampled_from([1, 2]),
)
def test_a_row_has_the_same_bits_in_every_batch(
    num_rows: int, depth: int, columns: int, first: int, threads: int
) -> None:
    rows, weight = random(num_rows, depth), random(depth, columns, seed=1)
    together = run(rows, weight, threads=threads)
    first %= num_rows
    np.testing.assert_array_equal(run(rows[first : first + 1], weight), together[first : first + 1])
    np.testing.assert_array_equal(run(rows[first:], weight), together[first:])


def test_one_chain_from_the_bias_on() -> None:
    """The order of the sum is part of the promise: fused multiply-adds over k = 0, 1, ..."""
    rows, weight, bias = random(8, 400), random(400, 3, seed=1), random(3, seed=2)
    chain = np.broadcast_to(bias, (8, 3)).astype(np.longdouble)
    for k in range(400):
        # A product of floats is exact in long double, so this rounds once, as an FMA does.
        exact = rows[:, k, None].astype(np.longdouble) * weight[k].astype(np.longdouble) + chain
        chain = exact.astype(np.float32).astype(np.longdouble)
    if kernels.instruction_set() == "portable":
        pytest.skip("this CPU's baseline has no fused multiply-add")
    np.testing.assert_array_equal(run(rows, weight, bias), chain.astype(np.float32))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("num_rows", [1, 3, 8, 11, 12, 50])
def test_every_instruction_set(num_rows: int, variant: str) -> None:
    rows, weight, bias = random(num_rows, 600), random(600, 173, seed=1), random(173, seed=2)
    residual = random(num_rows, 173, seed=3)
    library = library_of(variant)
    with selected(variant):
        output = run(rows, weight, bias, residual, threads=2, library=library)
    wanted = expected(rows, weight, bias) + residual
    np.testing.assert_allclose(output, wanted, atol=1e-4, rtol=1e-5)
    if variant != "portable" and kernels.instruction_set() != "portable":
        np.testing.assert_array_equal(output, run(rows, weight, bias, residual))


def test_the_function_body_computes_the_same() -> None:
    rows, weight, bias = random(5, 40), random(40, 21, seed=1), random(21, seed=2)
    evaluator = ReferenceEvaluator(model(21, with_body=True))
    for given_bias in (bias, np.zeros(0, np.float32)):
        for residual in (random(5, 21, seed=3), NO_RESIDUAL):
            feeds = {"input": rows, "weight": packed(weight), "bias": given_bias}
            outputs: Any = evaluator.run(None, {**feeds, "residual": residual})
            wanted = expected(rows, weight, given_bias if given_bias.size else None)
            wanted = wanted + residual if residual.size else wanted
            np.testing.assert_allclose(outputs[0], wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"weight": random(2, 8, 16)}, "has to be"),
        ({"weight": random(3, 9, 16)}, "has to be"),
        ({"weight": random(3, 8, 8)}, "has to be"),
        ({"input": random(2, 4, 8)}, "input has 3 dimensions and needs 2"),
        ({"bias": random(7)}, "bias has 7 elements"),
        ({"residual": random(4, 39)}, r"residual is \[4, 39\] and has to be \[4, 40\]"),
        ({"residual": random(1, 40)}, r"residual is \[1, 40\]"),
    ],
)
def test_wrong_shapes_are_refused(changes: dict[str, Array], sentence: str) -> None:
    feeds = {"input": random(4, 8), "weight": random(3, 8, 16), "bias": random(40)}
    with pytest.raises(Exception, match=sentence):
        session(40).run(None, {**feeds, "residual": NO_RESIDUAL, **changes})
