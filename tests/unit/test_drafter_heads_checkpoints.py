"""Medusa and MLP speculator checkpoints that do not fit are refused at open, with the names."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.compiler.config import SpeculativeConfig
from octavo.compiler.drafters import ModuleCheckpoint, TargetWeights, open_drafter
from octavo.compiler.drafters.medusa import open_medusa
from octavo.compiler.drafters.mlp_speculator import open_mlp_speculator
from octavo.compiler.drafters.tensors import TensorFolder
from octavo.graphs.errors import BuildError, CheckpointError
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

ORIGINAL = {"medusa_num_heads": 3, "medusa_num_layers": 1}
ORIGINAL_FILE = "medusa_lm_head.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "drafter"


def medusa(folder: Path, tensors: Tensors, **changes: Any) -> ModuleCheckpoint:
    write(folder, {**ORIGINAL, **changes}, tensors, ORIGINAL_FILE)
    return open_medusa(str(folder), target_facts())


def converted(folder: Path, tensors: Tensors, **changes: Any) -> ModuleCheckpoint:
    write(folder, converted_medusa_config(**changes), tensors)
    return open_medusa(str(folder), target_facts())


def speculator(folder: Path, tensors: Tensors, **changes: Any) -> ModuleCheckpoint:
    write(folder, speculator_config(**changes), tensors)
    return open_mlp_speculator(str(folder), target_facts())


def refused(folder: Path, opens: Callable[[], object], sentence: str) -> None:
    """`sentence` is the whole message, after the folder."""
    with pytest.raises(CheckpointError, match=f"^{re.escape(f'{folder}{sentence}')}$"):
        opens()


ANOTHER_MODEL = "get the drafter that was made for this model"
OTHER_VOCABULARY = (
    f" drafts for a model with a vocabulary of 48 and target has one of 40: {ANOTHER_MODEL}"
)
OTHER_SIZE = (
    f" drafts for a model with a hidden size of 24 and target has one of 16: {ANOTHER_MODEL}"
)


def test_medusa_of_another_vocabulary(folder: Path) -> None:
    refused(folder, lambda: medusa(folder, medusa_tensors(vocab_size=48)), OTHER_VOCABULARY)


def test_converted_medusa_of_another_vocabulary(folder: Path) -> None:
    """The config alone says it, also where the heads draft frequent tokens only."""
    changes = {"vocab_size": 48, "truncated_vocab_size": 8}
    tensors = {"token_map": np.arange(8), **converted_medusa_tensors(vocab_size=8)}
    refused(folder, lambda: converted(folder, tensors, **changes), OTHER_VOCABULARY)


def test_speculator_of_another_vocabulary(folder: Path) -> None:
    tensors = speculator_tensors(vocab_size=48)
    refused(folder, lambda: speculator(folder, tensors, vocab_size=48), OTHER_VOCABULARY)


def test_medusa_of_another_hidden_size(folder: Path) -> None:
    refused(folder, lambda: medusa(folder, medusa_tensors(hidden_size=24)), OTHER_SIZE)


def test_converted_medusa_of_another_hidden_size(folder: Path) -> None:
    tensors = converted_medusa_tensors(hidden_size=24)
    refused(folder, lambda: converted(folder, tensors, hidden_size=24), OTHER_SIZE)


def test_speculator_of_another_hidden_size(folder: Path) -> None:
    tensors = speculator_tensors(hidden_size=24)
    refused(folder, lambda: speculator(folder, tensors, emb_dim=24), OTHER_SIZE)


def test_missing_medusa_tensors(folder: Path) -> None:
    """All that the config promises, of which the first three are named."""
    refused(
        folder,
        lambda: medusa(folder, medusa_tensors(2), medusa_num_heads=4),
        " lacks 6 of the 12 tensors of 4 Medusa heads (layers: 1) (2.0.linear.weight, "
        "2.0.linear.bias, 3.0.linear.weight, ...): get the complete checkpoint",
    )


def test_original_medusa_layers_have_a_bias(folder: Path) -> None:
    tensors = {name: one for name, one in medusa_tensors(1).items() if "bias" not in name}
    refused(
        folder,
        lambda: medusa(folder, tensors, medusa_num_heads=1),
        " lacks 1 of the 3 tensors of 1 Medusa heads (layers: 1) (0.0.linear.bias): "
        "get the complete checkpoint",
    )


def test_missing_converted_medusa_tensors(folder: Path) -> None:
    tensors = converted_medusa_tensors(3)
    del tensors["lm_heads.1.weight"]
    refused(
        folder,
        lambda: converted(folder, tensors),
        " lacks 1 of the 6 tensors of 3 Medusa heads (layers: 1) (lm_heads.1.weight): "
        "get the complete checkpoint",
    )


def test_medusa_config_with_other_weights(folder: Path) -> None:
    tensors = {"model.norm.weight": np.ones(HIDDEN_SIZE, np.float32)}
    refused(
        folder,
        lambda: converted(folder, tensors, num_heads=1),
        " lacks 1 of the 1 tensors of 1 Medusa heads (layers: 1) (blocks.0.layers.0.weight): "
        "get the complete checkpoint",
    )


def test_missing_token_map(folder: Path) -> None:
    refused(
        folder,
        lambda: converted(folder, converted_medusa_tensors(vocab_size=8), truncated_vocab_size=8),
        " lacks 1 of the 7 tensors of 3 Medusa heads (layers: 1) (token_map): "
        "get the complete checkpoint",
    )


def test_missing_speculator_tensors(folder: Path) -> None:
    refused(
        folder,
        lambda: speculator(folder, speculator_tensors(2), n_predict=3),
        " lacks 5 of the 15 tensors of an MLP speculator of 3 stages (speculator.emb.2.weight, "
        "speculator.head.2.weight, speculator.ln.2.weight, ...): get the complete checkpoint",
    )


def test_wrong_medusa_shapes(folder: Path) -> None:
    tensors = medusa_tensors(3)
    tensors["1.0.linear.bias"] = np.ones(4, np.float32)
    tensors["2.1.weight"] = np.ones((VOCAB_SIZE - 1, HIDDEN_SIZE), np.float32)
    refused(
        folder,
        lambda: medusa(folder, tensors),
        " has 2 tensors of other shapes than those of 3 Medusa heads (layers: 1) "
        "(1.0.linear.bias is [4] instead of [16], 2.1.weight is [39, 16] instead of [40, 16]): "
        f"{ANOTHER_MODEL}",
    )


def test_wrong_speculator_shapes(folder: Path) -> None:
    """An inner size that the config does not name."""
    refused(
        folder,
        lambda: speculator(folder, speculator_tensors(1), n_predict=1, inner_dim=13),
        " has 5 tensors of other shapes than those of an MLP speculator of 1 stages "
        "(speculator.emb.0.weight is [40, 12] instead of [40, 13], speculator.head.0.weight is "
        "[40, 12] instead of [40, 13], speculator.ln.0.weight is [12] instead of [13], ...): "
        f"{ANOTHER_MODEL}",
    )


def test_more_drafts_than_heads(folder: Path) -> None:
    write(folder, ORIGINAL, medusa_tensors(3), ORIGINAL_FILE)
    config = SpeculativeConfig(method="medusa", model=str(folder), num_speculative_tokens=3)
    assert open_drafter(config, target_facts()).max_draft_tokens == 3
    with pytest.raises(BuildError, match="drafts at most 3 tokens, not 4"):
        open_drafter(config.model_copy(update={"num_speculative_tokens": 4}), target_facts())


def test_more_drafts_than_n_predict(folder: Path) -> None:
    write(folder, speculator_config(2), speculator_tensors(2))
    config = SpeculativeConfig(method="mlp_speculator", model=str(folder), num_speculative_tokens=2)
    assert open_drafter(config, target_facts()).max_draft_tokens == 2
    with pytest.raises(BuildError, match="drafts at most 2 tokens, not 5"):
        open_drafter(config.model_copy(update={"num_speculative_tokens": 5}), target_facts())


def test_pickles_are_never_loaded(folder: Path) -> None:
    write(folder, ORIGINAL, {}, ORIGINAL_FILE)
    (folder / ORIGINAL_FILE).rename(folder / "medusa_lm_head.pt")
    refused(
        folder,
        lambda: open_medusa(str(folder), target_facts()),
        " holds its weights only as pickles (medusa_lm_head.pt), which can run code and are never "
        "loaded: convert them to safetensors, for instance with `save_pretrained`",
    )


def test_no_weights_no_config_no_folder(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="is no folder: give the one that holds the drafter"):
        open_mlp_speculator(str(folder), target_facts())
    folder.mkdir()
    with pytest.raises(CheckpointError, match=r"has no config\.json: give the drafter's folder"):
        open_medusa(str(folder), target_facts())
    (folder / "config.json").write_text('{"medusa_num_heads": 1, "n_predict": 1}')
    with pytest.raises(CheckpointError, match=r"has no medusa_lm_head\.safetensors"):
        open_medusa(str(folder), target_facts())
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors"):
        open_mlp_speculator(str(folder), target_facts())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"n_predict": "3"}, '/config.json has n_predict = "3" where a whole number of at least 1'),
        ({"n_predict": 0}, "/config.json has n_predict = 0 where a whole number of at least 1"),
        ({"n_predict": None}, "/config.json names no n_predict: get the drafter's complete config"),
        ({"tie_weights": "yes"}, '/config.json has tie_weights = "yes" where true or false'),
        ({"method": "sum_lstm"}, " is a speculator of method 'sum_lstm' and only 'sum_rnn'"),
    ],
)
def test_wrong_speculator_configs(folder: Path, changes: dict[str, Any], sentence: str) -> None:
    write(folder, {**speculator_config(3), **changes}, speculator_tensors(3))
    with pytest.raises(CheckpointError, match=f"^{re.escape(f'{folder}{sentence}')}"):
        open_mlp_speculator(str(folder), target_facts())


def test_a_token_map_of_ids_that_do_not_exist(folder: Path) -> None:
    """Only its values say it: they are read with the weights."""
    tensors = {"token_map": np.array([0, VOCAB_SIZE]), **converted_medusa_tensors(1, vocab_size=2)}
    checkpoint = converted(folder, tensors, num_heads=1, truncated_vocab_size=2)
    head = torch.zeros(VOCAB_SIZE, HIDDEN_SIZE)
    with pytest.raises(CheckpointError, match="has a token_map with ids outside the vocabulary"):
        checkpoint.load_module(TargetWeights(head, head), torch.float32)


def test_weights_take_the_dtype_of_the_build(folder: Path) -> None:
    head = torch.zeros(VOCAB_SIZE, HIDDEN_SIZE)
    tensors = {n: t for n, t in medusa_tensors(2).items() if "linear" in n}
    module: Any = medusa(folder, tensors, medusa_num_heads=2).load_module(
        TargetWeights(head, head), torch.bfloat16
    )
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
    assert not module.training
    assert module(torch.zeros(3).long(), torch.ones(3, HIDDEN_SIZE)).dtype == torch.bfloat16


def test_the_digest_covers_config_and_weights(tmp_path: Path) -> None:
    tensors = speculator_tensors(1)
    first = speculator(tmp_path / "first", tensors, n_predict=1)
    moved = speculator(tmp_path / "moved", tensors, n_predict=1)
    scaled = speculator(tmp_path / "scaled", tensors, n_predict=1, scale_input=True)
    tensors["speculator.ln.0.bias"][0] += 1
    changed = speculator(tmp_path / "changed", tensors, n_predict=1)
    digests = [one.content_digest() for one in (first, moved, scaled, changed)]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_headers_tell_names_dtypes_and_shapes(folder: Path) -> None:
    write(folder, {}, {"a": np.zeros((2, 3), np.float16), "b": np.zeros(4, np.int64)})
    tensors = TensorFolder(folder)
    found = {name: (one.dtype, one.shape) for name, one in tensors.tensors.items()}
    assert found == {"a": ("F16", (2, 3)), "b": ("I64", (4,))}
    assert tensors.shape("c") is None
    loaded = tensors.load(["b"])
    assert list(loaded) == ["b"]
    assert loaded["b"].dtype == torch.int64


def test_opening_imports_no_torch(folder: Path) -> None:
    write(folder, ORIGINAL, medusa_tensors(3), ORIGINAL_FILE)
    program = (
        "import sys; from types import SimpleNamespace\n"
        "from octavo.compiler.drafters import TargetFacts\n"
        "from octavo.compiler.drafters.medusa import open_medusa\n"
        "facts = TargetFacts(SimpleNamespace(path='target'), 16, 40, 2, 'llama')\n"
        "print(open_medusa(sys.argv[1], facts).max_draft_tokens, 'torch' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == ["3", "False"]
