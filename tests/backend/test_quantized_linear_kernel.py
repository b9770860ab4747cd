"""The native quantised linear layer against products in float64, and bit for bit against itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper

from octavo.backends import kernels
from octavo.graphs.ops import quantized_linear_onnx
from octavo.graphs.ops.quantization import GROUP, LARGEST
from octavo.graphs.ops.quantized_linear import DEPTH, PANEL, SCHEMA
from octavo.graphs.ops.schema import DOMAIN, OPSET_VERSION
from tests.backend.kernel_variants import INTEGER_VARIANTS, library_of, selected

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

ELEMENT_TYPES = {
    "int8": TensorProto.INT8,
    "uint8": TensorProto.UINT8,
    "int32": TensorProto.INT32,
    "float16": TensorProto.FLOAT16,
    "float32": TensorProto.FLOAT,
}
T = TypeVar("T", bound=np.generic)

BITS = (8, 4)
SCALINGS = ("column", "group", "minimum")


@dataclass(frozen=True)
class Activations:
    values: NDArray[np.int8]  # [M, K]
    scales: Floats  # [M, ceil(K / 32)]

    def __getitem__(self, rows: slice) -> Activations:
        return Activations(self.values[rows], self.scales[rows])

    @property
    def padded(self) -> NDArray[np.int8]:
        return fill(self.values, 1, GROUP, 0)

    def feeds(self) -> dict[str, NDArray[Any]]:
        num_rows, depth = self.padded.shape
        sums = self.padded.reshape(num_rows, depth // GROUP, GROUP).sum(2, dtype=np.int32)
        return {"quantized": self.padded, "scales": self.scales, "sums": sums}

    def exact(self) -> Doubles:
        scales = self.scales.astype(np.float64).repeat(GROUP, 1)
        return self.values * scales[:, : self.values.shape[1]]


@dataclass(frozen=True)
class Layer:
    weight: NDArray[np.uint8]  # [K, N]
    bits: int
    zero_point: int
    column_scales: Floats = field(default_factory=lambda: np.zeros(0, np.float32))
    group_scales: NDArray[np.float16] | None = None  # [ceil(K / 32), N]
    group_minimums: NDArray[np.float16] | None = None
    bias: Floats = field(default_factory=lambda: np.zeros(0, np.float32))

    def feeds(self) -> dict[str, NDArray[Any]]:
        return {
            "weight": packed(fill(self.weight, 0, GROUP, self.zero_point), self.bits),
            "column_scales": self.column_scales,
            "group_scales": in_panels(self.group_scales, self.weight.shape[0]),
            "group_minimums": in_panels(self.group_minimums, self.weight.shape[0]),
            "bias": self.bias,
        }

    def exact(self) -> Doubles:
        """[K, N], by the definition in the schema."""
        centred = self.weight.astype(np.float64) - self.zero_point
        if self.group_scales is None:
            return centred * self.column_scales.astype(np.float64)
        depth = self.weight.shape[0]
        weight = centred * self.group_scales.astype(np.float64).repeat(GROUP, 0)[:depth]
        if self.group_minimums is not None:
            weight += self.group_minimums.astype(np.float64).repeat(GROUP, 0)[:depth]
        return weight


def fill(array: NDArray[T], axis: int, multiple: int, value: int) -> NDArray[T]:
    room = [(0, 0)] * array.ndim
    room[axis] = (0, -array.shape[axis] % multiple)
    return np.pad(array, room, constant_values=value)


def packed(weight: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """[Kp, N] as the schema has it; what is not in the matrix is anything here, say 7."""
    weight = fill(weight, 1, PANEL, 7)
    depth, columns = weight.shape
    quads = weight.reshape(depth // DEPTH, DEPTH, columns // PANEL, PANEL).transpose(2, 0, 3, 1)
    if bits == 4:
        quads = np.bitwise_or(quads[:, 0::2], quads[:, 1::2] * np.uint8(16))
    return np.ascontiguousarray(quads)


def in_panels(halves: NDArray[np.float16] | None, depth: int) -> NDArray[np.float16]:
    if halves is None:
        return np.zeros((0, 0, 0), np.float16)
    groups = -(-depth // GROUP)
    full = np.zeros((groups, -(-halves.shape[1] // PANEL) * PANEL), np.float16)
    full[: halves.shape[0], : halves.shape[1]] = halves
    return np.ascontiguousarray(full.reshape(groups, -1, PANEL).transpose(1, 0, 2))


def activations(num_rows: int, depth: int, seed: int = 0) -> Activations:
    random = np.random.default_rng(seed)
    values = random.integers(-LARGEST, LARGEST, (num_rows, depth), np.int8, endpoint=True)
    scales = random.uniform(0.001, 0.1, (num_rows, -(-depth // GROUP)))
    return Activations(values, scales.astype(np.float32))


def layer(
    depth: int,
    columns: int,
    bits: int = 8,
    scaling: str = "column",
    *,
    zero_point: int | None = None,
    with_bias: bool = False,
    seed: int = 1,
) -> Layer:
    random = np.random.default_rng(seed)
    weight = random.integers(0, 1 << bits, (depth, columns), np.uint8)
    middle = 1 << (bits - 1) if zero_point is None else zero_point
    bias = random.standard_normal(columns if with_bias else 0).astype(np.float32)
    if scaling == "column":
        scales = random.uniform(0.001, 0.1, columns).astype(np.float32)
        return Layer(weight, bits, middle, column_scales=scales, bias=bias)
    groups = (-(-depth // GROUP), columns)
    halves = random.uniform(0.001, 0.1, groups).astype(np.float16)
    minimums = random.uniform(-0.5, 0.5, groups).astype(np.float16)
    return Layer(
        weight,
        bits,
        middle,
        group_scales=halves,
        group_minimums=minimums if scaling == "minimum" else None,
        bias=bias,
    )


def model(columns: int, bits: int, zero_point: int) -> onnx.ModelProto:
    node = helper.make_node(
        SCHEMA.onnx_name,
        [operand.name for operand in SCHEMA.inputs],
        ["output"],
        domain=DOMAIN,
        columns=columns,
        bits=bits,
        zero_point=zero_point,
    )
    inputs = [
        helper.make_tensor_value_info(operand.name, ELEMENT_TYPES[operand.type_group], None)
        for operand in SCHEMA.inputs
    ]
    output = helper.make_tensor_value_info("output", TensorProto.FLOAT, None)
    return helper.make_model(
        helper.make_graph([node], "quantized_linear", inputs, [output]),
        opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, OPSET_VERSION)],
        ir_version=10,
    )


def session(
    columns: int, bits: int, zero_point: int, threads: int = 1, library: Path | None = None
) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    options.register_custom_ops_library(str(library or kernels.library_path()))
    return onnxruntime.InferenceSession(
        model(columns, bits, zero_point).SerializeToString(),
        options,
        providers=["CPUExecutionProvider"],
    )


def all_feeds(rows: Activations, linear: Layer, residual: Floats | None) -> dict[str, NDArray[Any]]:
    given = np.zeros((0, 0), np.float32) if residual is None else residual
    return {**rows.feeds(), **linear.feeds(), "residual": given}


def run(
    rows: Activations,
    linear: Layer,
    residual: Floats | None = None,
    *,
    threads: int = 1,
    library: Path | None = None,
) -> Floats:
    opened = session(linear.weight.shape[1], linear.bits, linear.zero_point, threads, library)
    return np.asarray(opened.run(None, all_feeds(rows, linear, residual))[0])


def run_body(rows: Activations, linear: Layer, residual: Floats | None = None) -> Floats:
    """What ONNX Runtime makes of the function body, without any kernel of ours."""
    with_body = model(linear.weight.shape[1], linear.bits, linear.zero_point)
    with_body.functions.append(quantized_linear_onnx.function())
    opened = onnxruntime.InferenceSession(
        with_body.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return np.asarray(opened.run(None, all_feeds(rows, linear, residual))[0])


def assert_close(
    output: Floats, rows: Activations, linear: Layer, residual: Floats | None = None
) -> None:
    wanted = rows.exact() @ linear.exact()
    if linear.bias.size:
        wanted = wanted + linear.bias
    if residual is not None:
        wanted = wanted + residual
    assert output.shape == wanted.shape
    assert (np.abs(output - wanted) <= rounding(rows, linear)).all()


def rounding(rows: Activations, linear: Layer) -> Doubles:
    """What adding in float32 may lose, of what is added."""
    return np.asarray(1e-5 * (np.abs(rows.exact()) @ np.abs(linear.exact())) + 1e-5)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 4, 7, 31, 97, 200])
@pytest.mark.parametrize(
    ("depth", "columns"), [(1, 1), (32, 40), (64, 32), (100, 33), (300, 130), (577, 7)]
)
def test_products(num_rows: int, depth: int, columns: int, bits: int, scaling: str) -> None:
    rows, linear = activations(num_rows, depth), layer(depth, columns, bits, scaling)
    assert_close(run(rows, linear, threads=2), rows, linear)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("zero_point", [0, 1, 7, 15])
def test_zero_point_bias_and_residual(bits: int, scaling: str, zero_point: int) -> None:
    rows = activations(5, 130)
    linear = layer(130, 45, bits, scaling, zero_point=zero_point, with_bias=True)
    residual = np.random.default_rng(2).standard_normal((5, 45)).astype(np.float32)
    assert_close(run(rows, linear, residual), rows, linear, residual)


@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("num_rows", "depth", "columns"), [(1, 96, 32), (3, 33, 5), (7, 200, 40)])
def test_the_onnx_body_and_the_kernel_agree(
    num_rows: int, depth: int, columns: int, bits: int, scaling: str, extras: bool
) -> None:
    rows = activations(num_rows, depth)
    linear = layer(depth, columns, bits, scaling, zero_point=3, with_bias=extras)
    added = np.random.default_rng(2).standard_normal((num_rows, columns)).astype(np.float32)
    residual = added if extras else None
    kernel, body = run(rows, linear, residual), run_body(rows, linear, residual)
    assert body.dtype == kernel.dtype
    assert body.shape == kernel.shape
    assert (np.abs(body - kernel) <= rounding(rows, linear)).all()


@pytest.mark.parametrize("num_rows", [2, 40])
def test_without_depth_the_output_is_bias_and_residual(num_rows: int) -> None:
    linear = layer(0, 20, with_bias=True)
    residual = np.random.default_rng(2).standard_normal((num_rows, 20)).astype(np.float32)
    output = run(activations(num_rows, 0), linear, residual)
    np.testing.assert_array_equal(output, linear.bias + residual)


@settings(max_examples=40, deadline=None)
@given(
    num_rows=st.integers(1, 210),
    depth=st.integers(1, 600),
    columns=st.integers(1, 140),
    first=st.integers(0, 209),
    bits=st.sampled_from(BITS),
    scaling=st.sampled_from(SCALINGS),
    threads=st.sampled_from([1, 2]),
)
def test_a_row_has_the_same_bits_in_every_batch(
    num_rows: int, depth: int, columns: int, first: int, bits: int, scaling: str, threads: int
) -> None:
    rows, linear = activations(num_rows, depth), layer(depth, columns, bits, scaling)
    together = run(rows, linear, threads=threads)
    first %= num_rows
    alone = run(rows[first : first + 1], linear)
    np.testing.assert_array_equal(alone, together[first : first + 1])
    np.testing.assert_array_equal(run(rows[first:], linear), together[first:])


def fused(a: NDArray[Any], b: NDArray[Any], c: NDArray[Any]) -> Floats:
    """a * b + c rounded once: a product of floats is exact in long double."""
    exact = a.astype(np.longdouble) * b.astype(np.longdouble) + c.astype(np.longdouble)
    return exact.astype(np.float32)


def chain(rows: Activations, linear: Layer) -> Floats:
    """The kernel's order of additions, which is part of the promise."""
    x = rows.padded.astype(np.int64)
    w = fill(linear.weight, 0, GROUP, linear.zero_point).astype(np.int64) - linear.zero_point
    sums = np.zeros((x.shape[0], w.shape[1]), np.float32)
    for first in range(0, linear.weight.shape[0], GROUP):
        part = slice(first, first + GROUP)
        products = (x[:, part] @ w[part]).astype(np.float32)
        scale = rows.scales[:, first // GROUP, None]
        if linear.group_scales is not None:
            scale = linear.group_scales[first // GROUP].astype(np.float32) * scale
        sums = fused(products, scale, sums)
        if linear.group_minimums is not None:
            total = x[:, part].sum(1, keepdims=True).astype(np.float32)
            minimum = linear.group_minimums[first // GROUP].astype(np.float32)[None]
            sums = fused(minimum, rows.scales[:, first // GROUP, None] * total, sums)
    bias = linear.bias if linear.bias.size else np.zeros(1, np.float32)
    column_scales = linear.column_scales if linear.column_scales.size else np.ones(1, np.float32)
    return fused(sums, column_scales[None], bias[None])


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_the_order_of_additions(bits: int, scaling: str) -> None:
    if kernels.instruction_set() == "portable":
        pytest.skip("this CPU's baseline has no fused multiply-add")
    rows, linear = activations(9, 700), layer(700, 45, bits, scaling, with_bias=True)
    residual = np.random.default_rng(2).standard_normal((9, 45)).astype(np.float32)
    np.testing.assert_array_equal(run(rows, linear, residual), chain(rows, linear) + residual)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("variant", INTEGER_VARIANTS)
def test_every_instruction_set(variant: str, bits: int, scaling: str) -> None:
    rows, linear = activations(50, 390), layer(390, 109, bits, scaling, with_bias=True)
    library = library_of(variant)
    with selected(variant):
        outputs = [run(rows[:n], linear, threads=2, library=library) for n in (50, 1, 2, 3, 4)]
    for output in outputs:
        assert_close(output, rows[: len(output)], linear)
        np.testing.assert_array_equal(output, outputs[0][: len(output)])
    if variant != "portable" and kernels.instruction_set() != "portable":
        np.testing.assert_array_equal(outputs[0], run(rows, linear))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("num_rows", [1, 8])
@pytest.mark.parametrize("variant", INTEGER_VARIANTS)
def test_extreme_values_do_not_saturate(variant: str, num_rows: int, bits: int) -> None:
    """Every product as large as it gets, of one sign and of both in turn: sums are exact.

    With scales of 1 the output is the integer itself, below 2^24.
    """
    depth, largest = 128, (1 << bits) - 1
    signs = np.stack([np.ones(depth), -np.ones(depth), np.resize([1, -1], depth)])
    values = np.resize(signs * LARGEST, (num_rows, depth)).astype(np.int8)
    rows = Activations(values, np.ones((num_rows, depth // GROUP), np.float32))
    weight = np.zeros((depth, 4), np.uint8)
    weight[:, 0] = largest
    weight[0::2, 1] = largest
    weight[1::2, 2] = largest
    library = library_of(variant)
    for zero_point in (0, largest // 2 + 1, largest):
        linear = Layer(weight, bits, zero_point, column_scales=np.ones(4, np.float32))
        with selected(variant):
            output = run(rows, linear, library=library)
        wanted = values.astype(np.int64) @ (weight.astype(np.int64) - zero_point)
        np.testing.assert_array_equal(output, wanted)


@pytest.mark.parametrize("num_rows", [1, 8])
@pytest.mark.parametrize("variant", INTEGER_VARIANTS)
def test_halves_of_every_size(variant: str, num_rows: int) -> None:
    """Scales from the smallest subnormal half to the largest, and both zeros, are exact."""
    halves = np.asarray([0x0001, 0x03FF, 0x0400, 0x3C00, 0x7BFF, 0x8001, 0xFBFF, 0x0000], np.uint16)
    scales = halves.view(np.float16)[None]
    weight = np.full((GROUP, len(halves)), 9, np.uint8)
    values = np.zeros((num_rows, GROUP), np.int8)
    values[:, 0] = 1
    rows = Activations(values, np.ones((num_rows, 1), np.float32))
    library = library_of(variant)
    with selected(variant):
        scaled = run(rows, Layer(weight, 4, 8, group_scales=scales), library=library)
        shifted = run(
            rows, Layer(weight, 4, 9, group_scales=scales, group_minimums=scales), library=library
        )
    wanted = np.resize(scales[0].astype(np.float32), (num_rows, len(halves)))
    np.testing.assert_array_equal(scaled, wanted)
    np.testing.assert_array_equal(shifted, wanted)


@pytest.mark.parametrize("bits", BITS)
def test_many_columns_on_two_threads(bits: int) -> None:
    for num_rows in (1, 3, 20, 400):
        rows, linear = activations(num_rows, 192), layer(192, 1500, bits, "group")
        output = run(rows, linear, threads=2)
        np.testing.assert_array_equal(output, run(rows, linear))
        assert_close(output, rows, linear)


def feeds_of(bits: int, scaling: str) -> dict[str, NDArray[Any]]:
    return all_feeds(activations(4, 128), layer(128, 40, bits, scaling), None)


F32, F16, S8, S32, U8 = (np.dtype(name) for name in ("f4", "f2", "i1", "i4", "u1"))


@pytest.mark.parametrize(
    ("scaling", "name", "array", "sentence"),
    [
        ("column", "quantized", np.zeros((4, 2, 64), S8), "quantized has 3 dimensions and needs 2"),
        ("column", "quantized", np.zeros((4, 100), S8), "quantized is 100 wide and has to be a"),
        ("column", "scales", np.zeros((4, 3), F32), r"scales is \[4, 3\] and has to be \[4, 4\]"),
        ("column", "scales", np.zeros((3, 4), F32), r"scales is \[3, 4\] and has to be \[4, 4\]"),
        ("column", "sums", np.zeros((4, 2), S32), r"sums is \[4, 2\] and has to be \[4, 4\]"),
        ("column", "weight", np.zeros((1, 32, 32, 4), U8), r"has to be \[2, 32, 32, 4\]"),
        ("column", "weight", np.zeros((2, 16, 32, 4), U8), r"has to be \[2, 32, 32, 4\]"),
        ("column", "weight", np.zeros((2, 32, 16, 4), U8), r"has to be \[2, 32, 32, 4\]"),
        ("column", "weight", np.zeros((2, 32, 32, 2), U8), r"has to be \[2, 32, 32, 4\]"),
        ("column", "weight", np.zeros((2, 32, 128), U8), "weight has 3 dimensions and needs 4"),
        ("column", "column_scales", np.zeros(39, F32), "column_scales has 39 elements"),
        ("column", "column_scales", np.zeros(0, F32), "neither column_scales and group_scales"),
        ("group", "column_scales", np.zeros(40, F32), "both column_scales and group_scales"),
        ("group", "group_scales", np.zeros((2, 2, 32), F16), r"has to be \[2, 4, 32\]"),
        ("group", "group_scales", np.zeros((1, 4, 32), F16), r"has to be \[2, 4, 32\]"),
        ("group", "group_minimums", np.zeros((2, 4, 16), F16), r"has to be \[2, 4, 32\]"),
        ("column", "group_minimums", np.zeros((2, 4, 32), F16), "without group_scales"),
        ("column", "bias", np.zeros(41, F32), "bias has 41 elements and has to have 40"),
        ("column", "residual", np.zeros((3, 40), F32), r"residual is \[3, 40\] and has to be"),
        ("column", "residual", np.zeros((4, 41), F32), r"residual is \[4, 41\] and has to be"),
    ],
)
def test_wrong_shapes_are_refused(
    scaling: str, name: str, array: NDArray[Any], sentence: str
) -> None:
    with pytest.raises(Exception, match=sentence):
        session(40, 8, 128).run(None, {**feeds_of(8, scaling), name: array})


@pytest.mark.parametrize(("bits", "other"), [(4, 8), (8, 4)])
def test_weights_of_another_width_are_refused(bits: int, other: int) -> None:
    with pytest.raises(Exception, match=f"of {bits} bits and a depth of 128; pack it again"):
        session(40, bits, 8).run(None, feeds_of(other, "column"))


@pytest.mark.parametrize(
    ("columns", "bits", "zero_point", "sentence"),
    [
        (0, 8, 128, "columns is 0 and has to be at least 1"),
        (8, 5, 8, "bits is 5 and has to be 4 or 8"),
        (8, 16, 8, "bits is 16 and has to be 4 to 8"),
        (8, 8, 256, "zero_point is 256 and has to be 0 to 255"),
        (8, 4, 16, "zero_point is 16 and has to be 0 to 15"),
        (8, 8, -1, "zero_point is -1 and has to be 0 to 255"),
    ],
)
def test_wrong_attributes_are_refused(
    columns: int, bits: int, zero_point: int, sentence: str
) -> None:
    with pytest.raises(Exception, match=sentence):
        session(columns, bits, zero_point)
