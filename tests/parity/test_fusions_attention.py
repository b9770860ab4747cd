"""Merged projections and fused attention: the same results, and matches counted by hand.

First the models of transformers, then one layer whose rotary embedding is written in many ways.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from octavo.backends.onnx_lowering import Layouts, to_onnx
from octavo.compiler.passes.fuse_attention import fuse_attention
from octavo.compiler.passes.merge_projections import merge_projections
from octavo.compiler.passes.pipeline import NORMALISE
from octavo.graphs.spec import PassRecord
from tests.parity import tiny_models
from tests.parity.test_passes import captured, count, results, step_inputs

PACKED = "2 x projection packed as it is"
CONCATENATED = "2 x queries, keys and values concatenated"
BOTH = ("2 x gate, up", "2 x query, key, value")
QKV = ("2 x query, key, value",)


def normalised(model_type: str) -> ExportedProgram:
    exported = captured(model_type).exported
    for apply in NORMALISE:
        exported, _ = apply(exported)
    return exported


def fused(exported: ExportedProgram) -> tuple[ExportedProgram, PassRecord, PassRecord]:
    """Runs both passes and proves that they change no results."""
    expected = results(exported)
    exported, merged = merge_projections(exported)
    for value, wanted in zip(results(exported), expected, strict=True):
        torch.testing.assert_close(value, wanted, msg="after merge_projections")
    exported, attention = fuse_attention(exported)
    for value, wanted in zip(results(exported), expected, strict=True):
        torch.testing.assert_close(value, wanted, msg="after fuse_attention")
    return exported, merged, attention


# Every model has two layers: notes of merge_projections, notes of fuse_attention, what was skipped.
MODELS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "llama": (BOTH, (PACKED, "2 x rotary"), ()),
    "qwen2": (BOTH, (PACKED, "2 x rotary"), ()),
    "qwen3": (BOTH, ("2 x QK norm", PACKED, "2 x rotary"), ()),
    "gemma2": (BOTH, (PACKED, "2 x rotary"), ()),
    "gemma3_text": (BOTH, ("2 x QK norm", PACKED, "2 x rotary"), ()),
    "mistral": (BOTH, (PACKED, "2 x rotary"), ()),
    "phi3": ((), (PACKED, "2 x rotary"), ()),
    "mixtral": (QKV, (PACKED, "2 x rotary"), ()),
    "gpt_oss": (QKV, (PACKED, "2 x rotary"), ()),
    "cohere": (BOTH, ("2 x interleaved rotary", PACKED), ()),
    "glm": (QKV, ("2 x interleaved rotary", PACKED), ()),  # half of a head
    "phi": (QKV, (PACKED, "2 x rotary"), ()),  # half of a head
    # The columns of a head's query, key and value are neighbours.
    "gpt_neox": ((), ("2 x projection with reordered weights", "2 x rotary"), ()),
    "gpt2": ((), (PACKED,), ()),
    "opt": (QKV, (PACKED,), ()),  # scaled queries
    "olmo2": (
        BOTH,
        (CONCATENATED, "2 x rotary"),
        ("2 x QK norm left alone: it is not one of the elements of a head",),
    ),
    "hunyuan_v1_dense": (  # norms after rotary embedding
        BOTH,
        (CONCATENATED,),
        ("2 x rotary left alone: other operators follow it",),
    ),
    "deepseek_v3": (
        ("2 x gate, up",),
        (CONCATENATED,),
        ("2 x rotary left alone: it does not turn the first elements of a head",),
    ),
}


@pytest.mark.parametrize("model_type", MODELS)
def test_what_matches_in_a_model(model_type: str) -> None:
    """M06: partial rotary (glm, phi, gpt_neox). M10: OLMo-2 norms the whole projection."""
    merge_notes, notes, skipped = MODELS[model_type]
    exported, merged, attention = fused(normalised(model_type))
    assert merged.notes == merge_notes
    assert attention.matches == 2
    assert attention.notes == notes
    assert attention.skipped == skipped
    assert count(exported, "octavo.paged_attention") == 0
    assert count(exported, "octavo.fused_paged_attention.default") == 2


def test_what_is_left_of_a_llama() -> None:
    """Four linear layers a layer and the head; the only slices are those of gate and up."""
    exported, _, _ = fused(normalised("llama"))
    assert count(exported, "aten.linear") == 2 * 4 + 1
    assert count(exported, "aten.slice") == 2 * 2
    assert count(exported, "aten.cat") == 1  # of the angles
    for gone in ("neg", "transpose", "view", "reshape"):
        assert count(exported, f"aten.{gone}") == 0


def test_onnx_runtime_computes_the_same_without_kernels() -> None:
    """The fused operator's function body, in a model."""
    program = captured("qwen3")
    expected = results(program.exported)
    exported, _, _ = fused(normalised("qwen3"))
    model = to_onnx(replace(program, exported=exported), Layouts())
    session = onnxruntime.InferenceSession(
        ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    names = [value.name for value in session.get_inputs()]
    indices, caches = step_inputs(program.exported)
    feeds = dict(zip(names, [x.numpy() for x in (*indices, *caches)], strict=True))
    found = session.run(None, feeds)
    for value, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(value), wanted, rtol=1e-4, atol=1e-4)


def test_weights_lie_in_the_order_query_key_value() -> None:
    model = tiny_models.model("qwen2")
    exported, _ = merge_projections(normalised("qwen2"))
    layer: Any = model.model.layers[1].self_attn
    projections = [layer.q_proj, layer.k_proj, layer.v_proj]
    name = "model.model.layers.1.self_attn.q_proj_k_proj_v_proj"
    weight, bias = (exported.state_dict[f"{name}.{kind}"] for kind in ("weight", "bias"))
    assert torch.equal(weight, torch.cat([p.weight for p in projections]))
    assert torch.equal(bias, torch.cat([p.bias for p in projections]))
    assert "model.model.layers.1.self_attn.q_proj.weight" not in exported.state_dict


def test_multi_head_latent_attention_is_not_merged() -> None:
    _, merged = merge_projections(normalised("deepseek_v3"))
    assert merged.skipped == ("2 x attention left alone: its key comes from 2 linear layers",)


class Gated(nn.Module):
    """silu(gate(x)) * up(x); only the gate has a bias, and its weight is a table of rows too."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(6, 8), nn.Linear(6, 8, bias=False)

    def forward(self, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        gated = self.up(x) * nn.functional.silu(self.gate(x))
        return gated, nn.functional.embedding(rows, self.gate.weight)


def test_a_missing_bias_is_zeros_and_a_shared_weight_stays() -> None:
    torch.manual_seed(0)
    module, inputs = Gated().eval(), (torch.randn(5, 6), torch.tensor([3, 1]))
    exported = torch.export.export(module, inputs, strict=False)
    exported, record = merge_projections(exported)
    assert record.notes == ("1 x gate, up",)
    assert count(exported, "aten.linear") == 1
    assert set(exported.state_dict) == {"gate.weight", "gate_up.weight", "gate_up.bias"}
    bias = exported.state_dict["gate_up.bias"]
    assert torch.equal(bias, torch.cat([module.gate.bias, torch.zeros(8)]))
    for value, wanted in zip(exported.module()(*inputs), module(*inputs), strict=True):
        torch.testing.assert_close(value, wanted)


T, HEADS, KV_HEADS, SIZE = 7, 4, 2, 8
Rotate = Callable[[Tensor, Tensor, Tensor], Tensor]


def tables(positions: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
    """cos and sin [T, 1, pairs]"""
    turns = positions.float()[:, None, None] * 0.6 ** torch.arange(pairs)
    return turns.cos(), turns.sin()


def halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.reshape(-1, x.shape[1], SIZE // 2, 2).unbind(-1)
    return torch.stack([cos * a - sin * b, sin * a + cos * b], -1).flatten(-2)


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x[..., : SIZE // 2], x[..., SIZE // 2 :]
    cos, sin = cos.repeat(1, 1, 2), sin.repeat(1, 1, 2)
    return x * cos + torch.cat((-b, a), -1) * sin


def first_half_of_the_head(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = halves(x[..., :4], cos[..., :2], sin[..., :2])
    return torch.cat([turned, x[..., 4:]], -1)


def last_half_of_the_head(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = halves(x[..., 4:], cos[..., :2], sin[..., :2])
    return torch.cat([x[..., :4], turned], -1)


def backwards(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return halves(x, cos, -sin)


def mirrored(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos + b * sin, b * cos - a * sin], -1)


def scaled(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return halves(x, cos, sin) * 0.5


def from_neighbours_to_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.reshape(-1, x.shape[1], SIZE // 2, 2).unbind(-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def own_angles_a_head(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    heads = x.shape[1]
    return torch.cat([halves(x[:, :1], cos, sin), halves(x[:, 1:heads], sin, cos)], 1)


class Layer(nn.Module):
    """One attention layer with the inputs of a step."""

    def __init__(self, rotate_query: Rotate, rotate_key: Rotate | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tiny_models.VOCAB_SIZE, 16)
        self.packed = nn.Linear(16, (HEADS + 2 * KV_HEADS) * SIZE)
        self.register_buffer("none", torch.zeros(0))
        self.register_buffer("slopes", torch.tensor([0.5, 0.25, 0.125, 0.0625]))
        self.rotate_query, self.rotate_key = rotate_query, rotate_key or rotate_query

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
        cos, sin = tables(positions, SIZE // 2)
        query, key, value = self.projected(self.embedding(token_ids.long()))
        attention, cache = torch.ops.octavo.paged_attention(
            self.rotate_query(query, cos, sin),
            self.rotate_key(key, cos, sin),
            value,
            kv_caches[0],
            slot_mapping,
            block_tables,
            query_start_loc,
            prefix_offsets,
            self.none,
            self.slopes,
            *(0.3, 1, 0, 0.0, 0),
        )
        return attention[logits_indices.long()].flatten(1), [cache]

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parts = self.packed(x).split([HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE], -1)
        query, key, value = (part.reshape(-1, part.shape[1] // SIZE, SIZE) for part in parts)
        return query, key, value


class KeysFirst(Layer):
    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parts = self.packed(x).split([KV_HEADS * SIZE, HEADS * SIZE, KV_HEADS * SIZE], -1)
        key, query, value = (part.reshape(-1, part.shape[1] // SIZE, SIZE) for part in parts)
        return query, key, value


def exported_layer(layer: Layer) -> ExportedProgram:
    tokens, rows = Dim("T", min=1, max=64), Dim("L", min=1, max=64)
    steps: list[dict[int, Any]] = [{0: tokens}] * 3 + [{}, {}, {}, {0: rows}]
    integers = (torch.zeros(size, dtype=torch.int32) for size in (T, T, T))
    inputs = (
        *integers,
        torch.zeros(2, 1, dtype=torch.int32),
        torch.tensor([0, 3, T], dtype=torch.int32),
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(3, dtype=torch.int32),
        [torch.zeros(6, 2, KV_HEADS, 16, SIZE)],
    )
    shapes = (*steps, [{0: Dim("N", min=1)}])
    with torch.no_grad():
        return torch.export.export(layer.eval(), inputs, dynamic_shapes=shapes, strict=False)


def fused_layer(layer: Layer) -> tuple[ExportedProgram, PassRecord]:
    torch.manual_seed(0)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    exported, _, record = fused(exported_layer(layer))
    assert count(exported, "octavo.fused_paged_attention") == 1
    return exported, record


@pytest.mark.parametrize(
    ("rotate", "kind"),
    [
        (halves, "rotary"),
        (rotate_half, "rotary"),
        (first_half_of_the_head, "rotary"),
        (backwards, "rotary"),  # the sine of the negative angle
        (neighbours, "interleaved rotary"),
    ],
)
def test_ways_to_write_rotary_embedding(rotate: Rotate, kind: str) -> None:
    exported, record = fused_layer(Layer(rotate))
    assert record.skipped == ()
    assert record.notes == tuple(sorted(("1 x projection packed as it is", f"1 x {kind}")))
    (node,) = (n for n in exported.graph.nodes if "fused_paged" in str(n.target))
    turned = 4 if rotate is first_half_of_the_head else SIZE
    assert node.args[1].meta["val"].shape[1] == node.args[2].meta["val"].shape[1] == turned
    assert node.args[12:16] == (HEADS, KV_HEADS, SIZE, int(rotate is neighbours))


def test_scaled_queries_scale_the_scores() -> None:
    exported, record = fused_layer(Layer(scaled, halves))
    assert record.notes == ("1 x projection packed as it is", "1 x rotary")
    (node,) = (n for n in exported.graph.nodes if "fused_paged" in str(n.target))
    assert node.args[17] == pytest.approx(0.3 * 0.5)


@pytest.mark.parametrize(
    ("rotate", "rotate_key", "reason"),
    [
        (halves, backwards, "queries and keys are turned by different angles"),
        (halves, scaled, "keys are scaled"),
        (halves, neighbours, "queries and keys are turned by different angles"),
        (halves, lambda x, cos, sin: x, "queries and keys are turned by different angles"),
        (last_half_of_the_head, None, "it does not turn the first elements of a head"),
        (mirrored, None, "its pairs are neither neighbours nor halves"),
        (own_angles_a_head, None, "it turns every head by other angles"),
        (lambda x, cos, sin: x * cos[..., :1], None, "its elements are scaled, not turned"),
        (
            lambda x, cos, sin: nn.functional.normalize(halves(x, cos, sin), dim=-1),
            None,
            "other operators follow it",
        ),
    ],
)
def test_why_rotary_embedding_is_left_alone(
    rotate: Rotate, rotate_key: Rotate | None, reason: str
) -> None:
    _, record = fused_layer(Layer(rotate, rotate_key))
    assert record.skipped == (f"1 x rotary left alone: {reason}",)
    assert record.notes == ("1 x queries, keys and values concatenated",)


@pytest.mark.parametrize(
    "layer", [KeysFirst(halves), Layer(from_neighbours_to_halves)], ids=["order", "pairs"]
)
def test_weights_are_reordered_where_columns_lie_otherwise(layer: Layer) -> None:
    exported, record = fused_layer(layer)
    assert record.notes == ("1 x projection with reordered weights", "1 x rotary")
    assert record.skipped == ()
    assert set(exported.state_dict) >= {"packed.weight.reordered", "packed.bias.reordered"}
    assert "packed.weight" not in exported.state_dict


def test_a_layer_without_rotary_embedding_keeps_its_slopes() -> None:
    exported, record = fused_layer(Layer(lambda x, cos, sin: x))
    assert record.notes == ("1 x projection packed as it is",)
    assert record.skipped == ()
    (node,) = (n for n in exported.graph.nodes if "fused_paged" in str(n.target))
    assert node.args[1].meta["val"].shape == (0, 0)
    assert node.args[11].name == "b_slopes"
