"""Medusa's heads and the MLP speculator against their formulas, from published formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file

from octavo.compiler.drafters import ModuleCheckpoint, TargetWeights
from octavo.compiler.drafters.medusa import open_medusa
from octavo.compiler.drafters.mlp_speculator import open_mlp_speculator
from tests.parity import heads_reference
from tests.unit.drafter_heads_files import (
    HIDDEN_SIZE,
    VOCAB_SIZE,
    Tensors,
    converted_medusa_config,
    converted_medusa_tensors,
    medusa_tensors,
    speculator_config,
    speculator_tensors,
    target_facts,
    write,
)

NUM_ROWS = 5
GENERATOR = np.random.default_rng(3)
FEATURES = GENERATOR.normal(size=(NUM_ROWS, HIDDEN_SIZE)).astype(np.float32)
TOKEN_IDS = GENERATOR.integers(VOCAB_SIZE, size=NUM_ROWS)
TARGET_HEAD = GENERATOR.normal(size=(VOCAB_SIZE, HIDDEN_SIZE)).astype(np.float32)
ORIGINAL = {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "x"}
ORIGINAL_FILE = "medusa_lm_head.safetensors"


def module_logits(checkpoint: ModuleCheckpoint, num_heads: int) -> NDArray[np.float32]:
    """[T, num_heads, V] of the loaded module."""
    head = torch.from_numpy(TARGET_HEAD)
    module: Any = checkpoint.load_module(TargetWeights(head, head), torch.float32)
    assert module.num_heads == num_heads
    assert module.feature_size == HIDDEN_SIZE
    with torch.no_grad():
        logits: torch.Tensor = module(torch.from_numpy(TOKEN_IDS), torch.from_numpy(FEATURES))
    assert logits.shape == (NUM_ROWS * num_heads, VOCAB_SIZE)
    return logits.view(NUM_ROWS, num_heads, VOCAB_SIZE).numpy()


def assert_close(found: NDArray[np.float32], expected: NDArray[np.float64]) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_original_medusa(tmp_path: Path, num_layers: int) -> None:
    tensors = medusa_tensors(3, num_layers)
    config = {**ORIGINAL, "medusa_num_layers": num_layers}
    checkpoint = open_medusa(
        str(write(tmp_path / "m", config, tensors, ORIGINAL_FILE)), target_facts()
    )
    expected = heads_reference.medusa(FEATURES.astype(np.float64), tensors, 3, num_layers)
    assert_close(module_logits(checkpoint, 3), expected)


def test_published_configs_name_fewer_heads_than_there_are(tmp_path: Path) -> None:
    tensors = medusa_tensors(5)
    config = {**ORIGINAL, "medusa_num_heads": 2}
    checkpoint = open_medusa(
        str(write(tmp_path / "m", config, tensors, ORIGINAL_FILE)), target_facts()
    )
    assert checkpoint.max_draft_tokens == 5
    expected = heads_reference.medusa(FEATURES.astype(np.float64), tensors, 5, 1)
    assert_close(module_logits(checkpoint, 5), expected)


def test_medusa_heads_in_the_whole_models_file(tmp_path: Path) -> None:
    """Medusa-2 trains both: the config is the model's own, with its 30 layers."""
    tensors = medusa_tensors(2)
    stored = {f"medusa_head.{name}": tensor for name, tensor in tensors.items()}
    stored["model.norm.weight"] = np.ones(HIDDEN_SIZE, np.float32)
    config = {**ORIGINAL, "medusa_num_heads": 2, "num_hidden_layers": 30}
    checkpoint = open_medusa(str(write(tmp_path / "m", config, stored)), target_facts())
    expected = heads_reference.medusa(FEATURES.astype(np.float64), tensors, 2, 1)
    assert_close(module_logits(checkpoint, 2), expected)


def test_original_medusa_without_output_embeddings_takes_the_targets(tmp_path: Path) -> None:
    tensors = {n: t for n, t in medusa_tensors(3).items() if "linear" in n}
    checkpoint = open_medusa(
        str(write(tmp_path / "m", ORIGINAL, tensors, ORIGINAL_FILE)), target_facts()
    )
    tensors |= {f"{head}.1.weight": TARGET_HEAD for head in range(3)}
    expected = heads_reference.medusa(FEATURES.astype(np.float64), tensors, 3, 1)
    assert_close(module_logits(checkpoint, 3), expected)


def converted_logits(tensors: Tensors, lm_heads: list[NDArray[np.float32]]) -> NDArray[np.float64]:
    """[T, heads, V] of heads with one layer each."""
    heads = [
        heads_reference.medusa_head(
            FEATURES.astype(np.float64),
            [
                (
                    tensors[f"blocks.{head}.layers.0.weight"],
                    tensors.get(f"blocks.{head}.layers.0.bias", 0.0),
                )
            ],
            lm_head,
        )
        for head, lm_head in enumerate(lm_heads)
    ]
    return np.stack(heads, axis=1)


@pytest.mark.parametrize("bias", [False, True])
def test_converted_medusa(tmp_path: Path, bias: bool) -> None:
    tensors = converted_medusa_tensors(3)
    if bias:
        for head in range(3):
            tensors[f"blocks.{head}.layers.0.bias"] = FEATURES[head]
    config = converted_medusa_config(logit_scale=0.5, medusa_fc_bias=bias)
    checkpoint = open_medusa(str(write(tmp_path / "m", config, tensors)), target_facts())
    expected = converted_logits(tensors, [tensors[f"lm_heads.{head}.weight"] for head in range(3)])
    assert_close(module_logits(checkpoint, 3), 0.5 * expected)


@pytest.mark.parametrize("stored", ["lm_heads.0.weight", "lm_head.weight", None])
def test_converted_medusa_with_one_output_embedding(tmp_path: Path, stored: str | None) -> None:
    """`original_lm_head`: the checkpoint's copy of it where there is one, else the target's."""
    tensors = {n: t for n, t in converted_medusa_tensors(3).items() if "blocks" in n}
    lm_head = TARGET_HEAD if stored is None else TARGET_HEAD[::-1].copy()
    if stored is not None:
        tensors[stored] = lm_head
    config = converted_medusa_config(original_lm_head=True)
    checkpoint = open_medusa(str(write(tmp_path / "m", config, tensors)), target_facts())
    assert_close(module_logits(checkpoint, 3), converted_logits(tensors, [lm_head] * 3))


@pytest.mark.parametrize("whole", [False, True])
def test_converted_medusa_of_frequent_tokens(tmp_path: Path, whole: bool) -> None:
    """Other tokens have no probability; output embeddings may be stored for all tokens."""
    token_map = np.array([31, 4, 0, 17, 39, 8])
    tensors = converted_medusa_tensors(2, vocab_size=VOCAB_SIZE if whole else len(token_map))
    tensors["token_map"] = token_map
    config = converted_medusa_config(2, truncated_vocab_size=len(token_map))
    checkpoint = open_medusa(str(write(tmp_path / "m", config, tensors)), target_facts())
    lm_heads = [tensors[f"lm_heads.{head}.weight"] for head in range(2)]
    rows = converted_logits(tensors, [h[token_map] if whole else h for h in lm_heads])
    expected = np.full((NUM_ROWS, 2, VOCAB_SIZE), -np.inf)
    expected[:, :, token_map] = rows
    assert_close(module_logits(checkpoint, 2), expected)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("scales_input", [False, True])
def test_mlp_speculator(tmp_path: Path, is_tied: bool, scales_input: bool) -> None:
    tensors = speculator_tensors(4, is_tied=is_tied)
    config = speculator_config(4, tie_weights=is_tied, scale_input=scales_input)
    checkpoint = open_mlp_speculator(str(write(tmp_path / "s", config, tensors)), target_facts())
    assert checkpoint.max_draft_tokens == 4
    expected = heads_reference.mlp_speculator(
        FEATURES.astype(np.float64),
        TOKEN_IDS,
        tensors,
        n_predict=4,
        is_tied=is_tied,
        scales_input=scales_input,
    )
    assert_close(module_logits(checkpoint, 4), expected)


def test_mlp_speculator_of_the_targets_own_width(tmp_path: Path) -> None:
    """`inner_dim` 0, one stage, and names without IBM's prefix."""
    tensors = speculator_tensors(1, inner_size=HIDDEN_SIZE)
    stored = {name.removeprefix("speculator."): tensor for name, tensor in tensors.items()}
    config = speculator_config(1, inner_dim=0)
    checkpoint = open_mlp_speculator(str(write(tmp_path / "s", config, stored)), target_facts())
    expected = heads_reference.mlp_speculator(
        FEATURES.astype(np.float64), TOKEN_IDS, tensors, n_predict=1
    )
    assert_close(module_logits(checkpoint, 1), expected)


def test_fewer_drafts_are_those_of_the_first_heads(tmp_path: Path) -> None:
    """The speculator's weights of state and token stay those of all its stages."""
    hidden = FEATURES.astype(np.float64)
    tensors = speculator_tensors(4)
    folder = write(tmp_path / "s", speculator_config(4), tensors)
    expected = heads_reference.mlp_speculator(hidden, TOKEN_IDS, tensors, n_predict=4)
    found = module_logits(open_mlp_speculator(str(folder), target_facts(), 2), 2)
    assert_close(found, expected[:, :2])

    heads = medusa_tensors(3)
    folder = write(tmp_path / "m", ORIGINAL, heads, ORIGINAL_FILE)
    found = module_logits(open_medusa(str(folder), target_facts(), 2), 2)
    assert_close(found, heads_reference.medusa(hidden, heads, 3, 1)[:, :2])


def test_shards_with_an_index(tmp_path: Path) -> None:
    tensors = speculator_tensors(2)
    folder = write(tmp_path / "s", speculator_config(2), {})
    (folder / "model.safetensors").unlink()
    names = list(tensors)
    shards = {"model-00001-of-00002.safetensors": names[:4]}
    shards["model-00002-of-00002.safetensors"] = names[4:]
    for file, own in shards.items():
        save_file({name: tensors[name] for name in own}, folder / file)
    weight_map = {name: file for file, own in shards.items() for name in own}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    expected = heads_reference.mlp_speculator(
        FEATURES.astype(np.float64), TOKEN_IDS, tensors, n_predict=2
    )
    found = module_logits(open_mlp_speculator(str(folder), target_facts()), 2)
    assert_close(found, expected)
