"""Drafters that do not fit their model are refused at build, by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.compiler.checkpoints import open_checkpoint
from octavo.compiler.config import SpeculativeConfig
from octavo.compiler.drafters import DrafterCheckpoint, TargetFacts, open_drafter
from octavo.graphs.errors import BuildError, CheckpointError
from tests.parity import feature_drafters as made
from tests.parity import tiny_models
from tests.unit import tokenizer_kinds

Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetFacts:
    path, _ = tiny_models.checkpoint(
        tmp_path_factory.mktemp("t") / "m", "llama", num_hidden_layers=6
    )
    checkpoint = open_checkpoint(path)
    return TargetFacts(checkpoint, made.HIDDEN, made.VOCAB, num_layers=6, model_type="llama")


def opened(method: str, folder: Path, target: TargetFacts) -> DrafterCheckpoint:
    config = SpeculativeConfig.model_validate({"method": method, "model": str(folder)})
    return open_drafter(config, target)


def drop(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(name)


def cut(name: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name] = tensors[name][:-1].contiguous()

    return change


def add(name: str, *shape: int) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__setitem__(name, torch.ones(*shape))


def keep(_: Tensors) -> None:
    """Changes nothing."""


EAGLE: list[tuple[dict[str, Any], Callable[[Tensors], None], str]] = [
    ({"vocab_size": 99}, keep, "drafts for a model with a vocabulary of 99 and .* one of 256"),
    ({"hidden_size": 32}, keep, "drafts for a model with a hidden size of 32 and .* one of 64"),
    ({"model_type": "mixtral"}, keep, "is of a drafter with mixtral layers"),
    ({}, drop("fc.weight"), r"lacks \d+ of the \d+ tensors of an EAGLE drafter of 1 layers"),
    ({}, drop("layers.0.mlp.up_proj.weight"), r"lacks 1 .*\(layers.0.mlp.up_proj.weight\)"),
    (
        {},
        cut("layers.0.self_attn.k_proj.weight"),
        r"layers.0.self_attn.k_proj.weight is \[31, 64\] instead of \[32, 64\]",
    ),
    ({"num_hidden_layers": 0}, keep, "has 0 layers, an EAGLE drafter has at least 1"),
    ({"bias": True}, drop("fc.bias"), r"lacks 1 .*\(fc.bias\)"),
    ({"bias": "yes"}, keep, 'has bias = "yes" where true or false belongs'),
    ({"mlp_bias": True}, keep, "has mlp_bias = true in its config and only false is known"),
    ({"logit_scale": 0.5}, keep, "has logit_scale = 0.5 in its config and only 1.0 is known"),
    (
        {"add_para_norm": True},
        add("embedding_layernorm.weight", 64),
        r"has 1 tensors that are not of an EAGLE drafter .*\(embedding_layernorm.weight\)",
    ),
    (
        {"qkv_bias": True},
        add("layers.0.self_attn.q_proj.bias", 64),
        r"has 1 tensors that are not of .*\(layers.0.self_attn.q_proj.bias\)",
    ),
]


@pytest.mark.parametrize(("content", "change", "sentence"), EAGLE)
def test_eagle_is_refused(
    tmp_path: Path,
    target: TargetFacts,
    content: dict[str, Any],
    change: Callable[[Tensors], None],
    sentence: str,
) -> None:
    tensors = made.eagle_tensors()
    change(tensors)
    folder = made.write(tmp_path / "d", {**made.CONFIG, **content}, tensors)
    with pytest.raises(CheckpointError, match=f"^{re.escape(str(folder))}.*{sentence}"):
        opened("eagle", folder, target)


EAGLE3: list[tuple[dict[str, Any], Callable[[Tensors], None], str]] = [
    ({"vocab_size": 99}, keep, "a vocabulary of 99"),
    ({"target_hidden_size": 32}, keep, "a hidden size of 32"),
    ({"num_hidden_layers": 2}, keep, "has 2 layers, an EAGLE-3 drafter has 1"),
    ({"draft_vocab_size": 49}, keep, r"lm_head.weight is \[50, 64\] instead of \[49, 64\]"),
    (
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 6]}},
        keep,
        "reads what goes into layer 6 and .* has 6 layers",
    ),
    ({}, drop("d2t"), r"lacks 1 .*\(d2t\)"),
    ({}, drop("fc.weight"), r"lacks 1 .*\(fc.weight\)"),
    ({}, drop("midlayer.input_layernorm.weight"), r"\(midlayer.input_layernorm.weight\)"),
    ({}, cut("fc.weight"), r"fc.weight is \[63, 192\] instead of \[64, 192\]"),
    ({}, add("fc.bias", 64), r"has 1 tensors that are not of an EAGLE-3 drafter \(fc.bias\)"),
    ({"draft_vocab_size": 300}, keep, r"drafts 300 tokens \(draft_vocab_size\) and .* has 256"),
    ({"draft_vocab_size": "50"}, keep, 'has draft_vocab_size = "50" where a whole number'),
    (
        {"eagle_aux_hidden_state_layer_ids": ["2"]},
        keep,
        r'has eagle_aux_hidden_state_layer_ids = \["2"\] where a list of layers belongs',
    ),
    (
        {"eagle_config": {"use_aux_hidden_state": False}},
        keep,
        "has use_aux_hidden_state = false in its config and only true is known",
    ),
    ({"norm_before_fc": True}, keep, "has norm_before_fc = true in its config"),
    ({"norm_output": True}, keep, "has norm_output = true in its config"),
]


@pytest.mark.parametrize(("content", "change", "sentence"), EAGLE3)
def test_eagle3_is_refused(
    tmp_path: Path,
    target: TargetFacts,
    content: dict[str, Any],
    change: Callable[[Tensors], None],
    sentence: str,
) -> None:
    tensors = made.eagle3_tensors()
    change(tensors)
    folder = made.write(tmp_path / "d", {**made.EAGLE3_CONFIG, **content}, tensors)
    with pytest.raises(CheckpointError, match=f"^{re.escape(str(folder))}.*{sentence}"):
        opened("eagle3", folder, target)


def test_what_no_drafter_reads_may_be_stored(tmp_path: Path, target: TargetFacts) -> None:
    """Rotary frequencies, the target's own output embedding, the map that training needs."""
    tensors = made.eagle_tensors()
    add("layers.0.self_attn.rotary_emb.inv_freq", 8)(tensors)
    add("lm_head.weight", made.VOCAB, made.HIDDEN)(tensors)
    opened("eagle", made.write(tmp_path / "eagle", made.CONFIG, tensors), target)
    tensors = made.eagle3_tensors()
    assert "t2d" in tensors
    opened("eagle3", made.write(tmp_path / "eagle3", made.EAGLE3_CONFIG, tensors), target)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_rotary_frequencies_stay_exact(tmp_path: Path, target: TargetFacts, method: str) -> None:
    """Weights of 16 bits do not round them: a position times the rounding would be an angle."""
    content = {**made.CONFIG, "rope_theta": 500.0}
    tensors = made.eagle_tensors()
    if method == "eagle3":
        content["draft_vocab_size"] = made.NUM_DRAFTED
        tensors = made.eagle3_tensors()
    module = loaded(opened(method, made.write(tmp_path / "d", content, tensors), target))
    assert {one.dtype for one in module.parameters()} == {torch.bfloat16}
    found = module.get_buffer("rotary_emb.inv_freq")
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, 500.0 ** (-torch.arange(8) / 8))


def loaded(drafter: DrafterCheckpoint) -> torch.nn.Module:
    """With weights of bfloat16."""
    from octavo.compiler.drafters import ModuleCheckpoint, TargetWeights

    assert isinstance(drafter, ModuleCheckpoint)
    ends = torch.zeros(made.VOCAB, made.HIDDEN)
    return drafter.load_module(TargetWeights(ends, ends), torch.bfloat16)


def test_ids_of_another_vocabulary_are_refused(tmp_path: Path, target: TargetFacts) -> None:
    """Only the values say it: they are read with the weights."""
    from octavo.compiler.drafters import ModuleCheckpoint, TargetWeights

    tensors = made.eagle3_tensors()
    tensors["d2t"] = tensors["d2t"] + made.VOCAB
    drafter = opened("eagle3", made.write(tmp_path / "d", made.EAGLE3_CONFIG, tensors), target)
    assert isinstance(drafter, ModuleCheckpoint)
    ends = torch.zeros(made.VOCAB, made.HIDDEN)
    with pytest.raises(CheckpointError, match="d2t with ids outside the vocabulary of 256 tokens"):
        drafter.load_module(TargetWeights(ends, ends), torch.float32)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_pickles_are_not_loaded(tmp_path: Path, target: TargetFacts, method: str) -> None:
    folder = made.write(tmp_path / "d", made.CONFIG, made.eagle_tensors())
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pickles .*convert them to safetensors"):
        opened(method, folder, target)


def test_a_folder_without_config_is_refused(tmp_path: Path, target: TargetFacts) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        opened("eagle", tmp_path, target)


def test_a_draft_model_of_another_vocabulary_is_refused(
    tmp_path: Path, target: TargetFacts
) -> None:
    path, _ = tiny_models.checkpoint(tmp_path / "m", "llama", vocab_size=300)
    with pytest.raises(CheckpointError, match=r"has a vocabulary of 300 tokens and .* one of 256"):
        opened("draft_model", path, target)


def test_a_draft_model_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    target, _ = tiny_models.checkpoint(tmp_path / "target", "llama", vocab_size=258)
    draft, _ = tiny_models.checkpoint(tmp_path / "draft", "llama", vocab_size=258)
    backend = tokenizer_kinds.byte_level()
    for folder in (target, draft):
        backend.save(str(folder / "tokenizer.json"))
    facts = TargetFacts(open_checkpoint(target), made.HIDDEN, 258, 2, "llama")
    opened("draft_model", draft, facts)
    content = json.loads(backend.to_str())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (draft / "tokenizer.json").write_text(json.dumps(content))
    sentence = rf"token {vocab['b']} is 'b' in {draft} and 'a' in {target}: .* the same tokenizer"
    with pytest.raises(CheckpointError, match=sentence):
        opened("draft_model", draft, facts)


def test_a_draft_model_with_too_few_positions_is_refused(tmp_path: Path) -> None:
    from octavo.compiler import BuildConfig, build_engine

    target, _ = tiny_models.checkpoint(tmp_path / "target", "llama")
    draft, _ = tiny_models.checkpoint(tmp_path / "draft", "llama", max_position_embeddings=100)
    speculative = (SpeculativeConfig(method="draft_model", model=str(draft)),)
    config = BuildConfig(
        model=str(target), output=tmp_path / "engine", use_cache=False, speculative=speculative
    )
    with pytest.raises(BuildError, match=r"has 100 positions, the engine's max_model_len is 512"):
        build_engine(config)
    assert not (tmp_path / "engine").exists()


def test_more_drafts_than_a_step_holds_are_refused(tmp_path: Path) -> None:
    from octavo.compiler import BuildConfig, build_engine

    target, _ = tiny_models.checkpoint(tmp_path / "target", "llama")
    speculative = (SpeculativeConfig(method="ngram", num_speculative_tokens=8),)
    config = BuildConfig(
        model=str(target),
        output=tmp_path / "engine",
        use_cache=False,
        max_num_batched_tokens=8,
        speculative=speculative,
    )
    with pytest.raises(BuildError, match=r"num_speculative_tokens=8 .*choose at most 7"):
        build_engine(config)


def test_drafters_that_read_different_hidden_states_do_not_share_an_engine(
    tmp_path: Path,
) -> None:
    from octavo.compiler import BuildConfig, build_engine

    target, _ = tiny_models.checkpoint(tmp_path / "target", "llama", num_hidden_layers=6)
    eagle = made.write(tmp_path / "eagle", made.CONFIG, made.eagle_tensors())
    eagle3 = made.write(tmp_path / "eagle3", made.EAGLE3_CONFIG, made.eagle3_tensors())
    speculative = (
        SpeculativeConfig(method="eagle", model=str(eagle)),
        SpeculativeConfig(method="eagle3", model=str(eagle3)),
    )
    config = BuildConfig(
        model=str(target), output=tmp_path / "engine", use_cache=False, speculative=speculative
    )
    with pytest.raises(BuildError, match="eagle and eagle3 read different hidden states"):
        build_engine(config)
