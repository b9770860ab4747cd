"""MTP layers that do not fit their model are refused at build, by name; what they load is exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.compiler.checkpoints import open_checkpoint
from octavo.compiler.config import SpeculativeConfig
from octavo.compiler.drafters import (
    DrafterCheckpoint,
    ModuleCheckpoint,
    TargetFacts,
    TargetWeights,
    open_drafter,
)
from octavo.graphs.errors import CheckpointError
from tests.parity import feature_drafters as made
from tests.parity import tiny_models


def open_mtp_of(path: Path, num_layers: int) -> DrafterCheckpoint:
    checkpoint = open_checkpoint(path)
    model_type = checkpoint.config.model_type
    facts = TargetFacts(checkpoint, made.HIDDEN, made.VOCAB, num_layers, model_type)
    return open_drafter(SpeculativeConfig(method="mtp"), facts)


def test_a_model_without_further_layers_has_no_mtp(tmp_path: Path) -> None:
    path, _ = tiny_models.checkpoint(tmp_path / "m", "llama")
    with pytest.raises(CheckpointError, match=r"has neither model.layers.2.eh_proj.weight nor "):
        open_mtp_of(path, 2)


def test_an_incomplete_mtp_layer_is_refused(tmp_path: Path) -> None:
    path, _ = tiny_models.checkpoint(tmp_path / "m", "qwen2")
    made._add(path, {"model.mtp_layers.0.input_proj.weight": torch.zeros(64, 128)})
    sentence = r"lacks 15 of the 16 tensors of its layer that predicts further tokens"
    with pytest.raises(CheckpointError, match=sentence):
        open_mtp_of(path, 2)


@pytest.mark.parametrize(
    ("name", "known"),
    [("layers.2.eh_proj", "deepseek_v3"), ("mtp_layers.0.input_proj", "qwen2 and mimo")],
)
def test_mtp_layers_of_another_model_are_refused(tmp_path: Path, name: str, known: str) -> None:
    path, _ = tiny_models.checkpoint(tmp_path / "m", "llama")
    made._add(path, {f"model.{name}.weight": torch.zeros(64, 128)})
    with pytest.raises(CheckpointError, match=f"is a llama model, .* only {known} are known"):
        open_mtp_of(path, 2)


def test_an_mtp_layer_with_further_tensors_is_refused(tmp_path: Path) -> None:
    path, _ = tiny_models.checkpoint(tmp_path / "m", "qwen2")
    made.add_mimo_layer(path)
    open_mtp_of(path, 2)
    unread = "model.mtp_layers.0.self_attn.q_norm.weight"
    made._add(path, {unread: torch.ones(16)})
    with pytest.raises(CheckpointError, match=rf"has 1 tensors that are not of .*\({unread}\)"):
        open_mtp_of(path, 2)


def test_an_mtp_layer_with_biases_of_attention_is_refused(tmp_path: Path) -> None:
    path, _ = tiny_models.checkpoint(tmp_path / "m", "deepseek_v3", attention_bias=True)
    made.add_deepseek_layer(path)
    with pytest.raises(CheckpointError, match="has attention_bias = true in its config"):
        open_mtp_of(path, 2)


def test_a_config_may_name_the_biases_that_mimo_has_anyway(tmp_path: Path) -> None:
    """Qwen2's layers have biases of attention whatever a config says of them."""
    path, _ = tiny_models.checkpoint(tmp_path / "m", "qwen2", attention_bias=True)
    made.add_mimo_layer(path)
    assert open_mtp_of(path, 2).method == "mtp"


def test_the_bias_of_experts_stays_exact(tmp_path: Path) -> None:
    """At values about 14 a bfloat16 has steps of 1/16, and experts differ by less."""
    path, _ = tiny_models.checkpoint(tmp_path / "m", "deepseek_v3", first_k_dense_replace=1)
    made.add_deepseek_layer(path)
    name = "mlp.gate.e_score_correction_bias"
    bias = 14 + torch.arange(4) / 1000
    made._add(path, {f"model.layers.2.{name}": bias})
    drafter = open_mtp_of(path, 2)
    assert isinstance(drafter, ModuleCheckpoint)
    ends = torch.zeros(made.VOCAB, made.HIDDEN)
    module = drafter.load_module(TargetWeights(ends, ends), torch.bfloat16)
    assert module.get_buffer(f"block.{name}").tolist() == bias.tolist()
    assert {one.dtype for one in module.parameters()} == {torch.bfloat16}


def test_a_gguf_has_no_mtp(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    checkpoint: Any = type("Checkpoint", (), {"path": file})()
    facts = TargetFacts(checkpoint, made.HIDDEN, made.VOCAB, 6, "llama")
    with pytest.raises(CheckpointError, match="is no folder of safetensors"):
        open_drafter(SpeculativeConfig(method="mtp"), facts)
