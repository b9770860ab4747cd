"""Capture: what the graph learns of each layer, what is frozen, what is refused and why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from octavo.backends.manifest import Limits
from octavo.compiler.attention_interface import IMPLEMENTATION
from octavo.compiler.capture import capture
from octavo.compiler.checkpoints import TokenFacts
from octavo.compiler.isolation import graph_tracer, prove_isolation
from octavo.compiler.masks import MaskRule, infer_rule
from octavo.graphs.errors import UnsupportedModelError
from octavo.graphs.program import CapturedProgram
from tests.parity import tiny_models

LIMITS = Limits(max_model_len=128, max_num_seqs=8, max_num_batched_tokens=64, block_size=16)
FACTS = TokenFacts(1, (2,), 0, tiny_models.VOCAB_SIZE)


def captured(
    model: PreTrainedModel, max_model_len: int = 128, dtype: torch.dtype = torch.float32
) -> CapturedProgram:
    limits = LIMITS.model_copy(update={"max_model_len": max_model_len})
    return capture(model, FACTS, limits, dtype)


def causal(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return key <= query


@pytest.mark.parametrize(
    ("mask", "rule"),
    [
        (causal, MaskRule(True, 0)),
        (lambda b, h, q, k: (k <= q) & (q - k < 24), MaskRule(True, 24)),
        (lambda b, h, q, k: (k <= q) & (q - k < 1), MaskRule(True, 1)),
        # A window that no position within the limit reaches is none.
        (lambda b, h, q, k: (k <= q) & (q - k < 128), MaskRule(True, 0)),
        (lambda b, h, q, k: q.new_ones(()) + k * 0 > 0, MaskRule(False, 0)),
    ],
)
def test_masks_that_attention_expresses(mask: Any, rule: MaskRule) -> None:
    assert infer_rule(mask, 128) == rule


@pytest.mark.parametrize(
    "mask",
    [
        lambda b, h, q, k: (k <= q) & (q // 32 == k // 32),  # chunked
        lambda b, h, q, k: (k <= q) | (k < 8),  # a prefix seen by all
        lambda b, h, q, k: (k <= q) & (k % 2 == 0),  # strided
        lambda b, h, q, k: (k <= q) & ((q - k < 24) | (k < 4)),  # sinks kept in the window
    ],
)
def test_masks_that_attention_cannot_express(mask: Any) -> None:
    assert not infer_rule(mask, 128).expressible


def test_each_layer_is_described() -> None:
    """M08: Gemma-2 caps the scores, and every other layer has a window."""
    spec = captured(tiny_models.model("gemma2")).spec
    assert [layer.sliding_window for layer in spec.layers] == [24, 0]
    assert {layer.softcap for layer in spec.layers} == {2.0}
    assert {(layer.num_heads, layer.num_kv_heads, layer.head_dim) for layer in spec.layers} == {
        (4, 2, 16)
    }
    assert spec.vocab_size == tiny_models.VOCAB_SIZE
    assert spec.num_parameters == sum(p.numel() for p in tiny_models.model("gemma2").parameters())


def test_sinks_and_value_head_sizes_are_seen() -> None:
    """M09, and keys of 24 beside values of 12."""
    assert all(layer.has_sinks for layer in captured(tiny_models.model("gpt_oss")).spec.layers)
    layers = captured(tiny_models.model("deepseek_v3")).spec.layers
    assert {(layer.head_dim, layer.value_head_dim) for layer in layers} == {(24, 12)}


def test_a_derived_head_size_is_found() -> None:
    """M11: without head_dim in the config it is hidden_size / num_attention_heads."""
    layers = captured(tiny_models.model("qwen2", head_dim=..., hidden_size=48)).spec.layers
    assert {layer.head_dim for layer in layers} == {12}


def longrope(model_type: str = "phi3") -> PreTrainedModel:
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    parameters = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 64,
        **factors,
    }
    return tiny_models.model(
        model_type,
        rope_parameters=parameters,
        head_dim=...,
        original_max_position_embeddings=64,
    )


@pytest.mark.parametrize(("max_model_len", "chosen"), [(64, "original"), (65, "scaled")])
def test_longrope_is_frozen_by_the_engines_length(max_model_len: int, chosen: str) -> None:
    """M03, M04: at its original length a model has the short factors, beyond it the long ones."""
    model = longrope()
    rotary: Any = model.model.rotary_emb
    short, long = rotary.original_inv_freq.clone(), rotary.original_inv_freq / 4
    program = captured(model, max_model_len)
    torch.testing.assert_close(rotary.inv_freq, short if chosen == "original" else long)
    (record,) = [r for r in program.records if r.name == "freeze_rotary"]
    assert chosen in record.notes[0]


def test_dynamic_scaling_is_refused_beyond_the_original_length() -> None:
    parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = tiny_models.model("llama", rope_parameters=parameters, max_position_embeddings=64)
    with pytest.raises(UnsupportedModelError, match="--max-model-len 64"):
        captured(model, 65)
    captured(tiny_models.model("llama", rope_parameters=parameters, max_position_embeddings=64), 64)


class Wrapped(nn.Module):
    """An attention that asks the interface for something else than HF's own code does."""

    def __init__(self, attention: nn.Module, **arguments: Any) -> None:
        super().__init__()
        self.attention = attention
        self.arguments = arguments

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.attention(*args, **{**kwargs, **self.arguments})


def with_attention(**arguments: Any) -> PreTrainedModel:
    model = tiny_models.model("llama")
    layers: Any = model.model.layers
    layers[1].self_attn = Wrapped(layers[1].self_attn, **arguments)
    return model


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"position_bias": torch.zeros(1)}, "attends with 'position_bias'"),
        ({"attention_mask": torch.zeros(1)}, "builds an attention mask of its own"),
        ({"attention_mask": MaskRule(False, 0)}, "lets tokens see later tokens"),
        (
            {"attention_mask": MaskRule(True, 0, expressible=False)},
            "neither causal nor a sliding window",
        ),
    ],
)
def test_attention_that_a_paged_graph_cannot_express(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        captured(with_attention(**arguments))


def test_attention_outside_the_interface_is_refused() -> None:
    with pytest.raises(
        UnsupportedModelError, match="BloomForCausalLM attends with code of its own"
    ):
        captured(tiny_models.model("bloom", n_head=4, n_layer=2))


class LooksBack(nn.Module):
    """Adds the previous row of the flattened batch: the kind of leak that the proof must find."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.mlp(x)
        return mixed + 1e-2 * nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_leak_in_the_captured_graph_is_named(dtype: torch.dtype) -> None:
    model = tiny_models.model("llama")
    layers: Any = model.model.layers
    layers[1].mlp = LooksBack(layers[1].mlp)
    module: nn.Module = model
    module.to(dtype)
    program = captured(model, dtype=dtype)
    with pytest.raises(UnsupportedModelError, match=r"in LooksBack \(model.layers.1.mlp"):
        prove_isolation(graph_tracer(program.exported), program.spec, 16, dtype)


def test_where_capture_fails_the_eager_module_that_mixes_is_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Scans rarely export: their shapes' constraints would be a riddle to the user."""

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("Constraints violated (T)")

    monkeypatch.setattr(torch.export, "export", refuse)
    model = tiny_models.model("llama")
    with pytest.raises(UnsupportedModelError, match=r"cannot be captured .*Constraints violated"):
        captured(model)
    model = tiny_models.model("llama")
    layers: Any = model.model.layers
    layers[1].mlp = LooksBack(layers[1].mlp)
    with pytest.raises(UnsupportedModelError, match=r"in LooksBack \(model.layers.1.mlp\)"):
        captured(model)


class Remembers(nn.Module):
    """Adds the sum of all earlier tokens of the same sequence that are in the step."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.mlp(x) + x.cumsum(1)
        return result


def test_state_that_only_a_chunk_would_lose_is_found() -> None:
    """A scan leaks between sequences as well; the first module that does is named."""
    model = tiny_models.model("llama")
    layers: Any = model.model.layers
    layers[0].mlp = Remembers(layers[0].mlp)
    program = captured(model)
    with pytest.raises(UnsupportedModelError, match="Remembers"):
        prove_isolation(graph_tracer(program.exported), program.spec, 16, torch.float32)


def test_a_model_set_to_paged_attention_runs_only_inside_a_capture() -> None:
    model = tiny_models.model("llama")
    model.set_attn_implementation(IMPLEMENTATION)
    with pytest.raises(RuntimeError, match="only inside a capture"):
        model(torch.zeros(1, 3, dtype=torch.long))
