"""Weights to integers and back: packing, rounding to 8 and 4 bits, blocks of GGUF files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from octavo.compiler.quantization import int4, int8, tables
from octavo.compiler.quantization.gguf_blocks import GgufBlocks
from octavo.compiler.quantization.packing import by_rows, pack
from octavo.graphs.ops.quantized_linear_torch import unpack_groups, unpack_weight


def integers(columns: int, depth: int, below: int) -> Tensor:
    generator = torch.Generator().manual_seed(columns * depth)
    return torch.randint(0, below, (columns, depth), generator=generator).to(torch.uint8)


def test_a_byte_of_8_bits_lies_at_its_panel_quad_column_and_place() -> None:
    matrix = integers(40, 70, 256)
    packed = pack(matrix, 8, 128, column_scales=torch.ones(40))
    assert packed.weight.shape == (2, 96 // 4, 32, 4)
    for column, k in ((0, 0), (5, 3), (31, 69), (32, 4), (39, 68)):
        assert packed.weight[column // 32, k // 4, column % 32, k % 4] == matrix[column, k]
    # Beyond the matrix all is the zero point.
    assert (packed.weight[1, :, 8:] == 128).all()
    assert packed.weight[0, 17, 0].tolist() == [*matrix[0, 68:70].tolist(), 128, 128]


def test_4_bits_are_the_low_halves_for_four_values_and_the_high_halves_for_the_next_four() -> None:
    matrix = integers(33, 64, 16)
    packed = pack(matrix, 4, 8, group_scales=torch.ones(33, 2).half())
    assert packed.weight.shape == (2, 64 // 8, 32, 4)
    for column, k in ((0, 0), (7, 8), (31, 59), (32, 40)):
        low = packed.weight[column // 32, k // 8, column % 32, k % 4]
        assert low & 15 == matrix[column, k // 8 * 8 + k % 4]
        assert low >> 4 == matrix[column, k // 8 * 8 + 4 + k % 4]
    assert (packed.weight[1, :, 1:] == 8 * 16 + 8).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("columns", "depth"), [(1, 1), (32, 64), (33, 65), (100, 96), (70, 200)])
def test_packing_is_undone(bits: int, columns: int, depth: int) -> None:
    matrix = integers(columns, depth, 1 << bits)
    groups = torch.rand(columns, -(-depth // 32)).half()
    packed = pack(matrix, bits, 3, group_scales=groups, group_minimums=-groups)
    unpacked = unpack_weight(packed.weight, bits)
    torch.testing.assert_close(unpacked[:columns, :depth], matrix, rtol=0, atol=0)
    assert (unpacked[columns:] == 3).all()
    assert (unpacked[:, depth:] == 3).all()
    for kept, sign in ((packed.group_scales, 1), (packed.group_minimums, -1)):
        values = unpack_groups(kept)
        assert values.shape == unpacked[:, ::32].shape
        assert torch.equal(values[:columns, : groups.shape[1]], sign * groups.float())


def test_parts_of_a_matrix_join_to_the_whole() -> None:
    matrix, scales = integers(5000, 100, 256), torch.rand(5000)
    whole = pack(matrix, 8, 128, column_scales=scales)
    parts = by_rows(5000, 100, lambda rows: pack(matrix[rows], 8, 128, column_scales=scales[rows]))
    assert parts.columns == 5000
    assert torch.equal(parts.weight, whole.weight)
    assert torch.equal(parts.column_scales, whole.column_scales)


def test_int8_rounds_halves_to_even_and_keeps_the_largest_magnitude() -> None:
    # Scale 1 in the first row: the weights are their integers. Its halves go to the even neighbour.
    weight = torch.tensor(
        [[127.0, -0.5, 0.5, 1.5, 2.5, -126.6], [0.0] * 6, [-254.0, 3, 1, 0, 0, 2]]
    )
    packed = int8.quantize(weight)
    assert (packed.columns, packed.bits, packed.zero_point) == (3, 8, 128)
    signed = unpack_weight(packed.weight, 8)[:3, :6].int() - 128
    assert signed.tolist() == [[127, 0, 0, 2, 2, -127], [0] * 6, [-127, 2, 0, 0, 0, 1]]
    assert packed.column_scales.tolist() == [1.0, 0.0, 2.0]


@pytest.mark.parametrize("magnitude", [1.0, 1e-30, 1e30, 1e-40])
def test_int8_is_off_by_half_a_scale_at_most(magnitude: float) -> None:
    weight = torch.randn(65, 130, generator=torch.Generator().manual_seed(0)) * magnitude
    exact, packed = weight.double().numpy(), int8.quantize(weight)
    scales = np.abs(exact).max(1) / 127
    difference = np.abs(packed.dequantized(130).double().numpy() - exact)
    # Denormal scales are a multiple of 2^-149 and so are their products.
    assert (difference <= scales[:, None] * 0.5001 + 127 * 2.0**-149).all()


def grid(columns: int, depth: int) -> Tensor:
    """Weights on a grid of 16 values a group; the first and the last value are always used."""
    generator = torch.Generator().manual_seed(7)
    levels = torch.randint(0, 16, (columns, depth // 32, 32), generator=generator)
    levels[..., 3], levels[..., 8] = 0, 15
    scales = (torch.rand(columns, depth // 32, 1, generator=generator) / 50).half().float()
    minimums = (torch.randn(columns, depth // 32, 1, generator=generator) / 10).half().float()
    return (levels * scales + minimums).view(columns, depth)


def test_int4_keeps_weights_that_lie_on_a_grid_already() -> None:
    weight = grid(64, 160)
    assert torch.equal(int4.quantize(weight).dequantized(160), weight)


@pytest.mark.parametrize("depth", [64, 96, 40])
def test_int4_beats_the_grid_from_smallest_to_largest(depth: int) -> None:
    weight = torch.randn(64, depth, generator=torch.Generator().manual_seed(1))
    weight[3, 5] = 20  # an outlier
    exact = weight.double().numpy()
    plain = np.zeros_like(exact)
    for start in range(0, depth, 32):
        group = exact[:, start : start + 32]
        low = group.min(1, keepdims=True)
        step = (group.max(1, keepdims=True) - low) / 15
        plain[:, start : start + 32] = np.rint((group - low) / step) * step + low
    packed = int4.quantize(weight)
    assert (packed.bits, packed.zero_point) == (4, 0)
    made = packed.dequantized(depth).double().numpy()
    error, plain_error = ((x - exact) ** 2 for x in (made, plain))
    assert error.sum() < 0.9 * plain_error.sum()
    # No group is worse, but for what float16 rounds of its scale and minimum.
    for start in range(0, depth, 32):
        own, other = (e[:, start : start + 32].sum(1) for e in (error, plain_error))
        assert (own <= other * 1.02).all()


def test_int4_integers_are_the_nearest_to_the_float16_grid() -> None:
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(2)) * 1e-3
    packed = int4.quantize(weight)
    levels = unpack_weight(packed.weight, 4).double().view(32, 2, 32)
    scales = unpack_groups(packed.group_scales).double()[..., None]
    minimums = unpack_groups(packed.group_minimums).double()[..., None]
    exact = weight.double().view(32, 2, 32)
    nearest = ((exact - minimums) / scales).clamp(0, 15)
    assert (levels - nearest).abs().max() <= 0.5 + 1e-4


def test_int4_of_equal_weights_is_that_weight_in_float16() -> None:
    packed = int4.quantize(torch.full((2, 64), 0.1))
    assert torch.equal(packed.dequantized(64), torch.full((2, 64), 0.1).half().float())


@dataclass
class StandIn:
    """A tensor of a file that was never written."""

    tensor_type: GGMLQuantizationType
    data: Any = None


BLOCKS = {
    "Q4_0": (GGMLQuantizationType.Q4_0, 4, 8),
    "Q4_1": (GGMLQuantizationType.Q4_1, 4, 0),
    "Q8_0": (GGMLQuantizationType.Q8_0, 8, 128),
}


def written(path: Path, tensors: dict[str, tuple[np.ndarray[Any, Any], str]]) -> Sequence[Any]:
    """The tensors of a GGUF file of these, in blocks of the type named with each."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, (weight, kind) in tensors.items():
        blocks = BLOCKS[kind][0]
        writer.add_tensor(name, gguf.quantize(weight, blocks), raw_dtype=blocks)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return gguf.GGUFReader(path).tensors


def weights(columns: int, depth: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).normal(size=(columns, depth)).astype(np.float32)


def floats(tensor: Any) -> Tensor:
    return torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type))


@pytest.mark.parametrize("kind", list(BLOCKS))
def test_blocks_are_imported_as_they_are(kind: str, tmp_path: Path) -> None:
    first, second = written(
        tmp_path / "m.gguf", {"a": (weights(48, 96), kind), "b": (weights(20, 96, 1), kind)}
    )
    _, bits, zero_point = BLOCKS[kind]
    # Rows permuted, two tensors in one, as transformers and the passes leave them.
    matrix = torch.cat([floats(first)[torch.randperm(48)], floats(second)])
    found = GgufBlocks([first, second]).find(matrix, (4, 8))
    assert found is not None
    assert found.block_type == kind
    assert (found.packed.bits, found.packed.zero_point) == (bits, zero_point)
    assert torch.equal(found.packed.dequantized(96), matrix)
    assert (found.packed.group_minimums.numel() > 0) == (kind == "Q4_1")


def test_the_smallest_byte_of_8_bits_is_imported_too(tmp_path: Path) -> None:
    (tensor,) = written(tmp_path / "m.gguf", {"a": (weights(32, 64), "Q8_0")})
    changed = tensor.data.copy()
    changed[0, 2] = 0x80  # -128, which no quantiser writes
    stand_in = StandIn(tensor.tensor_type, changed)
    matrix = floats(stand_in)
    found = GgufBlocks([stand_in]).find(matrix, (8,))
    assert found is not None
    assert unpack_weight(found.packed.weight, 8)[0, 0] == 0
    assert torch.equal(found.packed.dequantized(64), matrix)


def test_what_does_not_fit_is_not_found(tmp_path: Path) -> None:
    four, eight = written(
        tmp_path / "m.gguf", {"a": (weights(32, 64), "Q4_1"), "b": (weights(32, 64, 1), "Q8_0")}
    )
    blocks = GgufBlocks([four, eight])
    assert blocks.find(floats(four), (8,)) is None  # of another number of bits
    assert blocks.find(torch.cat([floats(four), floats(eight)]), (4, 8)) is None  # of two types
    changed = floats(four)
    changed[7, 9] += 1e-6
    assert blocks.find(changed, (4, 8)) is None
    assert blocks.find(floats(four)[:, :32], (4, 8)) is None


def test_types_that_are_not_imported_are_named(tmp_path: Path) -> None:
    (tensor,) = written(tmp_path / "m.gguf", {"a": (weights(32, 64), "Q4_1")})
    other, plain = StandIn(GGMLQuantizationType.Q6_K), StandIn(GGMLQuantizationType.F32)
    assert GgufBlocks([tensor, other, other, plain]).foreign_types == ("2 x Q6_K",)


def test_a_table_is_rounded_in_groups_of_32() -> None:
    weight = torch.randn(50, 100, generator=torch.Generator().manual_seed(4))
    weight[7] = 0
    table = tables.quantize(weight)
    assert table.integers.shape == (50, 4, 32)
    assert table.minimums is None
    exact = np.pad(weight.double().numpy(), ((0, 0), (0, 28))).reshape(50, 4, 32)
    scales = np.abs(exact).max(-1) / 127
    np.testing.assert_allclose(table.scales[..., 0].numpy(), scales, rtol=1e-6)
    made = table.integers.double().numpy() * table.scales.double().numpy()
    assert (np.abs(made - exact) <= scales[..., None] * 0.5001).all()


@pytest.mark.parametrize("kind", list(BLOCKS))
def test_a_table_of_blocks_is_exact(kind: str, tmp_path: Path) -> None:
    (tensor,) = written(tmp_path / "m.gguf", {"a": (weights(40, 96), kind)})
    found = GgufBlocks([tensor]).find(floats(tensor), (4, 8))
    assert found is not None
    table = tables.from_packed(found.packed, 96)
    minimums = 0 if table.minimums is None else table.minimums
    rows = (table.integers.float() * table.scales + minimums).view(40, 96)
    assert torch.equal(rows, floats(tensor))
