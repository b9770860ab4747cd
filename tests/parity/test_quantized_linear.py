"""`octavo::quantized_linear`: the torch reference and the ONNX body against float64 arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx.helper
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray

from octavo.compiler.quantization.packing import PackedWeight, pack
from octavo.graphs.ops import quantized_linear_onnx
from octavo.graphs.ops.quantization_torch import quantize
from octavo.graphs.ops.quantized_linear import SCHEMA
from octavo.graphs.ops.quantized_linear_torch import quantized_linear

Array = NDArray[Any]


def make(columns: int, depth: int, kind: str) -> tuple[PackedWeight, Array, Array]:
    """A packed matrix of random integers and, in float64, the matrix that it stands for.

    The last are the magnitudes of what its elements are summed from.
    """
    generator = np.random.default_rng(columns + depth)
    bits = 4 if kind.startswith("4") else 8
    zero_point = {"8": 128, "8 grouped": 128, "8 minimums": 3, "4": 8, "4 minimums": 0}[kind]
    integers = generator.integers(0, 1 << bits, (columns, depth)).astype(np.uint8)
    centred = integers.astype(np.float64) - zero_point
    if kind == "8":
        scales = generator.uniform(1e-3, 1e-2, columns).astype(np.float32)
        packed = pack(
            torch.from_numpy(integers), bits, zero_point, column_scales=torch.from_numpy(scales)
        )
        matrix = centred * scales[:, None]
        return packed, matrix, np.abs(matrix)
    groups = (columns, -(-depth // 32))
    scales = generator.uniform(1e-3, 1e-2, groups).astype(np.float16)
    minimums = generator.normal(0, 0.1, groups).astype(np.float16)
    has_minimums = kind.endswith("minimums")
    packed = pack(
        torch.from_numpy(integers),
        bits,
        zero_point,
        group_scales=torch.from_numpy(scales),
        group_minimums=torch.from_numpy(minimums) if has_minimums else None,
    )
    scale, minimum = (x.astype(np.float64).repeat(32, 1)[:, :depth] for x in (scales, minimums))
    minimum = minimum * has_minimums
    return packed, centred * scale + minimum, np.abs(centred * scale) + np.abs(minimum)


def operands(
    rows: int, columns: int, depth: int, kind: str, *, extras: bool
) -> tuple[list[Any], Array, Array]:
    """Operands and attributes of the operator, what it should give, and the sum of magnitudes."""
    packed, matrix, matrix_magnitude = make(columns, depth, kind)
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, depth, generator=generator)
    quantized, scales, sums = quantize(x)
    bias = torch.randn(columns if extras else 0, generator=generator)
    residual = torch.randn(*((rows, columns) if extras else (0, 0)), generator=generator)
    inputs = quantized.double().numpy() * scales.double().numpy().repeat(32, 1)
    inputs = inputs[:, :depth]
    expected, magnitude = inputs @ matrix.T, np.abs(inputs) @ matrix_magnitude.T
    if extras:
        added = bias.double().numpy() + residual.double().numpy()
        expected, magnitude = expected + added, magnitude + np.abs(added)
    tensors = [quantized, scales, sums, *packed.tensors, bias, residual]
    return [*tensors, columns, packed.bits, packed.zero_point], expected, magnitude


def body_result(arguments: list[Any]) -> Array:
    """The function body, run by ONNX Runtime without any kernel of ours."""
    count = len(SCHEMA.inputs)
    names = [operand.name for operand in SCHEMA.inputs]
    attributes = dict(zip((a.name for a in SCHEMA.attributes), arguments[count:], strict=True))
    node = onnx.helper.make_node(SCHEMA.onnx_name, names, ["output"], domain="octavo", **attributes)
    feeds = {name: t.numpy() for name, t in zip(names, arguments[:count], strict=True)}
    inputs = [
        onnx.helper.make_tensor_value_info(
            name, onnx.helper.np_dtype_to_tensor_dtype(value.dtype), [None] * value.ndim
        )
        for name, value in feeds.items()
    ]
    output = onnx.helper.make_tensor_value_info("output", onnx.TensorProto.FLOAT, [None, None])
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("octavo", 1)]
    model = onnx.helper.make_model(
        onnx.helper.make_graph([node], "g", inputs, [output]),
        functions=[quantized_linear_onnx.function()],
        opset_imports=opsets,
        ir_version=10,
    )
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    result: Array = session.run(None, feeds)[0]
    return result


def reference_result(arguments: list[Any]) -> Array:
    result: Array = quantized_linear(*arguments).numpy()
    return result


KINDS = ["8", "8 grouped", "8 minimums", "4", "4 minimums"]


@pytest.mark.parametrize("run", [reference_result, body_result])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "columns", "depth"),
    [(3, 40, 96), (1, 32, 64), (7, 100, 200), (5, 33, 33), (0, 40, 64)],
)
@pytest.mark.parametrize("extras", [False, True])
def test_against_float64(
    run: Callable[[list[Any]], Array], kind: str, rows: int, columns: int, depth: int, extras: bool
) -> None:
    arguments, expected, magnitude = operands(rows, columns, depth, kind, extras=extras)
    result = run(arguments)
    assert result.dtype == np.float32
    assert result.shape == (rows, columns)
    # Each product and sum rounds once, by at most 2^-24 of the magnitudes that went into it.
    assert (np.abs(result - expected) <= (depth + 8) * 2.0**-24 * magnitude).all()


def test_a_row_of_the_reference_does_not_depend_on_the_others() -> None:
    arguments, _, _ = operands(64, 96, 640, "4 minimums", extras=False)
    whole = quantized_linear(*arguments)
    for count in (1, 5, 33):
        rows = [x[:count] for x in arguments[:3]]
        torch.testing.assert_close(
            quantized_linear(*rows, *arguments[3:]), whole[:count], rtol=0, atol=0
        )


def test_products_of_a_group_are_exact_integers() -> None:
    """The largest sums: 32 times 127 * 255, which a float32 accumulator still holds exactly."""
    columns, depth = 32, 32
    integers = torch.full((columns, depth), 255, dtype=torch.uint8)
    packed = pack(integers, 8, 0, column_scales=torch.ones(columns))
    values = torch.full((1, depth), 127, dtype=torch.int8)
    values[0, 0] = 126
    inputs = [values, torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32)]
    tensors = [*inputs, *packed.tensors, torch.zeros(0), torch.zeros(0, 0)]
    arguments: list[Any] = [*tensors, columns, 8, 0]
    result = quantized_linear(*arguments)
    assert (result == 31 * 127 * 255 + 126 * 255).all()
