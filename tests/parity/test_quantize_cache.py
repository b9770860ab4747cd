"""The int8 cache: a program's inputs, outputs and results before and after."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from octavo.backends.onnx_lowering import Layouts, to_onnx
from octavo.backends.torch import archive
from octavo.compiler.passes.quantize_cache import quantize_cache
from octavo.graphs.errors import BuildError
from octavo.graphs.ops import fused_paged_attention_torch as _registers_the_operator  # noqa: F401
from octavo.graphs.program import CapturedProgram
from octavo.graphs.spec import AttentionSpec, ModelSpec
from tests.parity.test_passes import captured

HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 16, 16
COLUMNS = (HEADS + 2 * KV_HEADS) * SIZE


class TwoLayers(nn.Module):
    """Fused attention twice; the embedding gives packed projections."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding = nn.Parameter(torch.randn(11, COLUMNS, generator=generator))
        self.second = nn.Parameter(torch.randn(HEADS * SIZE, COLUMNS, generator=generator) / 8)
        self.register_buffer("no_rows", torch.zeros(0, 0))
        self.register_buffer("no_vector", torch.zeros(0))

    def attend(self, qkv: Tensor, cache: Tensor, step: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        norms = (self.no_vector, self.no_vector)
        attributes = (HEADS, KV_HEADS, SIZE, 0, 1e-6, 0.25, 1, 0, 0.0, 0)
        result = torch.ops.octavo.fused_paged_attention(
            qkv, self.no_rows, self.no_rows, *norms, cache, *step, *norms, *attributes
        )
        return cast("tuple[Tensor, Tensor]", result)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        block_tables: Tensor,
        query_start_loc: Tensor,
        prefix_offsets: Tensor,
        logits_indices: Tensor,
        kv_caches: list[Tensor],
    ) -> tuple[Tensor, list[Tensor]]:
        step = (slot_mapping, block_tables, query_start_loc, prefix_offsets)
        first, cache = self.attend(self.embedding[token_ids], kv_caches[0], step)
        second, other = self.attend(first @ self.second, kv_caches[1], step)
        return second[logits_indices], [cache, other]


def step(tokens: list[int], prefix: int) -> tuple[Tensor, ...]:
    """One sequence in blocks 2 and 1."""
    table = torch.tensor([2, 1])
    positions = torch.arange(prefix, prefix + len(tokens))
    values = (
        torch.tensor(tokens),
        positions,
        table[positions // BLOCK] * BLOCK + positions % BLOCK,
        table[None],
        torch.tensor([0, len(tokens)]),
        torch.tensor([prefix]),
        torch.arange(len(tokens)),
    )
    return tuple(value.to(torch.int32) for value in values)


def program() -> ExportedProgram:
    caches = [torch.zeros(3, 2, KV_HEADS, BLOCK, SIZE) for _ in range(2)]
    tokens, sequences, width = Dim("T", min=1, max=64), Dim("B", min=1), Dim("M", min=1)
    by_token, rows = {0: tokens}, {0: Dim("L", min=0, max=64)}
    shapes = (by_token, by_token, by_token, {0: sequences, 1: width}, {0: sequences + 1})
    blocks = [{0: Dim("N", min=1)}] * 2
    inputs = list(step([1, 2, 3, 4, 5], 0))
    inputs[3] = torch.tensor([[2, 1], [0, 0]], dtype=torch.int32)
    inputs[4] = torch.tensor([0, 3, 5], dtype=torch.int32)
    inputs[5] = torch.zeros(2, dtype=torch.int32)
    return torch.export.export(
        TwoLayers(),
        (*inputs, caches),
        dynamic_shapes=(*shapes, {0: sequences}, rows, blocks),
        strict=False,
    )


def zeros() -> list[Tensor]:
    return [torch.zeros(3, 2, KV_HEADS, BLOCK, SIZE) for _ in range(2)]


def integer_zeros() -> list[Tensor]:
    caches = [cache.to(torch.int8) for cache in zeros()]
    return [*caches, *(torch.zeros(3, 2, KV_HEADS, BLOCK) for _ in caches)]


STEPS = [([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9], 0), ([3, 2], 15), ([10], 17)]


@torch.no_grad()
def test_results_move_by_what_the_cache_rounds() -> None:
    module = program().module()
    quantized, record = quantize_cache(program())
    assert (record.name, record.matches) == ("quantize_cache", 2)
    integer_module = quantized.module()
    caches, integers = zeros(), integer_zeros()
    for tokens, prefix in STEPS:
        logits, caches = module(*step(tokens, prefix), caches)
        rounded, integers = integer_module(*step(tokens, prefix), integers)
        assert len(integers) == 4
        assert (rounded - logits).norm() < 0.02 * logits.norm()
    # Of the first layer, whose keys and values are those of the float program, exactly.
    exact, kept, scales = caches[0].double(), integers[0].double(), integers[2].double()
    assert [x.dtype for x in integers] == [torch.int8] * 2 + [torch.float32] * 2
    largest = exact.abs().amax(-1)
    torch.testing.assert_close(scales, largest / 127, rtol=1e-6, atol=0)
    assert ((kept * scales[..., None] - exact).abs() <= scales[..., None] * 0.5001).all()
    assert kept.abs().amax() == 127


@torch.no_grad()
def test_the_program_is_saved_and_opened(tmp_path: Path) -> None:
    quantized, _ = quantize_cache(program())
    tokens, prefix = STEPS[0]
    expected, _ = quantized.module()(*step(tokens, prefix), integer_zeros())
    archive.save(quantized, tmp_path / "model.pt2")
    logits, changed = archive.load(tmp_path / "model.pt2")(*step(tokens, prefix), integer_zeros())
    torch.testing.assert_close(logits, expected, rtol=0, atol=0)
    assert len(changed) == 4


def spec() -> ModelSpec:
    layer = AttentionSpec(
        num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=SIZE, value_head_dim=SIZE, scale=0.25
    )
    return ModelSpec(
        architecture="TwoLayers",
        model_type="two_layers",
        vocab_size=HEADS * SIZE,
        hidden_size=HEADS * SIZE,
        max_position_embeddings=32,
        tie_word_embeddings=False,
        layers=(layer, layer),
        num_parameters=0,
        sampled_vocab_size=11,
    )


def test_inputs_and_outputs_are_named_as_the_spec_declares_them() -> None:
    quantized, _ = quantize_cache(program())
    model = to_onnx(CapturedProgram(quantized, spec(), BLOCK), Layouts())
    declared = list(spec().kv_cache_bindings(BLOCK, "int8"))
    assert [binding.name for binding in declared] == [
        "kv_cache.0",
        "kv_cache.1",
        "kv_scales.0",
        "kv_scales.1",
    ]
    outputs = ["kv_cache_out.0", "kv_cache_out.1", "kv_scales_out.0", "kv_scales_out.1"]
    assert [value.name for value in model.graph.outputs] == ["logits", *outputs]
    for values in (model.graph.inputs[7:], model.graph.outputs[1:]):
        for value, binding in zip(values, declared, strict=True):
            assert [str(size) for size in cast(ir.Shape, value.shape)] == [*map(str, binding.shape)]
            assert cast(ir.DataType, value.dtype).numpy() == np.dtype(binding.dtype)
    assert [value.name for value in model.graph.inputs[7:]] == [b.name for b in declared]


def test_attention_that_is_not_fused_is_refused() -> None:
    with pytest.raises(BuildError, match="2 of 2 attention layers are not fused"):
        quantize_cache(captured("llama").exported)
