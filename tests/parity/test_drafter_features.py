"""EAGLE, EAGLE-3 and MTP: checkpoint to compiled drafter, against their formulas written out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3RotaryEmbedding,
)

from octavo.backends import registry
from octavo.backends.base import BuildOptions, Executable, LoadOptions
from octavo.backends.bundle import read_manifest
from octavo.backends.manifest import Limits
from octavo.compiler.checkpoints import open_checkpoint
from octavo.compiler.config import SpeculativeConfig
from octavo.compiler.drafters import TargetFacts, TargetWeights, open_drafter
from octavo.compiler.drafters.build import build_drafter
from octavo.compiler.profiles import make_profiles
from octavo.graphs.spec import ModelSpec
from octavo.runtime.speculation.draft_batch import DraftRun, pack_runs
from tests.parity import feature_drafters as made
from tests.parity import tiny_models

LIMITS = Limits(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64, block_size=16)
TABLES = ([3, 1], [0, 2])

# tokens i64 [T], features [T, h] -> logits [T, V], hidden states [T, h]
Reference = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def drafter(
    folder: Path, config: SpeculativeConfig, target: Path, backend_name: str
) -> tuple[Executable, TargetWeights]:
    """The executable of a compiled drafter, and random weights of the target's ends."""
    checkpoint = open_checkpoint(target)
    text: Any = checkpoint.config
    facts = TargetFacts(
        checkpoint, text.hidden_size, text.vocab_size, text.num_hidden_layers, text.model_type
    )
    generator = torch.Generator().manual_seed(9)
    weights = TargetWeights(*(made.random(generator, made.VOCAB, made.HIDDEN) for _ in range(2)))
    spec = ModelSpec(
        architecture="Target",
        model_type="target",
        vocab_size=made.VOCAB,
        hidden_size=made.HIDDEN,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        layers=(),
        num_parameters=0,
        sampled_vocab_size=made.VOCAB,
    )
    options = BuildOptions(
        limits=LIMITS,
        profiles=make_profiles(LIMITS),
        dtype="float32",
        kv_cache_dtype="float32",
    )
    backend = registry.get(backend_name)
    opened = open_drafter(config, facts)
    built = build_drafter(opened, config, spec, weights, backend, options, folder)
    manifest = read_manifest(folder / built.path)
    executable = backend.load(folder / built.path, manifest, LoadOptions(num_threads=1))
    executable.allocate_kv_cache(4)
    return executable, weights


def check(executable: Executable, reference: Reference) -> None:
    """Two sequences in one run, the second in two, then a chain of three drafts of each."""
    generator = torch.Generator().manual_seed(11)
    tokens = [torch.randint(0, made.VOCAB, (n,), generator=generator) for n in (17, 9)]
    features = [torch.randn(len(t), made.HIDDEN, generator=generator) for t in tokens]
    pieces = [[(0, 0, 17), (1, 0, 5)], [(1, 5, 9)]]
    last: dict[int, tuple[Tensor, Tensor]] = {}
    for step in pieces:
        runs = [
            DraftRun(TABLES[s], start, tokens[s][start:end].int().numpy(), True)
            for s, start, end in step
        ]
        given = torch.cat([features[s][start:end] for s, start, end in step]).numpy()
        outputs = executable.run(pack_runs(runs, LIMITS.block_size, given))
        assert outputs.hidden_states is not None
        for row, (s, _, end) in enumerate(step):
            wanted, hidden = reference(tokens[s][:end], features[s][:end])
            assert_close(outputs.logits[row], wanted[-1])
            assert_close(outputs.hidden_states[row], hidden[-1])
            last[s] = torch.tensor(outputs.logits[row]), torch.tensor(outputs.hidden_states[row])
    for _ in range(3):
        for s in (0, 1):
            logits, hidden = last[s]
            tokens[s] = torch.cat([tokens[s], logits.argmax()[None]])
            features[s] = torch.cat([features[s], hidden[None]])
        runs = [DraftRun(TABLES[s], len(t) - 1, t[-1:].int().numpy(), True)
                for s, t in enumerate(tokens)]  # fmt: skip
        given = torch.stack([f[-1] for f in features]).numpy()
        outputs = executable.run(pack_runs(runs, LIMITS.block_size, given))
        assert outputs.hidden_states is not None
        for s in (0, 1):
            wanted, states = reference(tokens[s], features[s])
            assert_close(outputs.logits[s], wanted[-1])
            assert_close(outputs.hidden_states[s], states[-1])
            last[s] = torch.tensor(outputs.logits[s]), torch.tensor(outputs.hidden_states[s])


def assert_close(found: np.ndarray[Any, Any], wanted: Tensor) -> None:
    scale = float(wanted[wanted.isfinite()].abs().max())
    np.testing.assert_allclose(found, wanted.numpy(), rtol=2e-4, atol=1e-5 * scale)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, _ = tiny_models.checkpoint(tmp_path_factory.mktemp("llama") / "m", "llama")
    return path


backends = pytest.mark.parametrize("backend", ["torch", "onnxruntime"])


@backends
@pytest.mark.parametrize(("prefix", "bias"), [("", True), ("model.", False)])
def test_eagle(tmp_path: Path, llama: Path, backend: str, prefix: str, bias: bool) -> None:
    tensors = made.eagle_tensors(prefix, bias=bias)
    head = made.write(tmp_path / "eagle", made.CONFIG, tensors)
    config = SpeculativeConfig(method="eagle", model=str(head))
    executable, target = drafter(tmp_path, config, llama, backend)
    own = made.part(tensors, prefix)
    layer = made.part(own, "layers.0.")

    def reference(tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        joined = torch.cat([target.embedding[tokens], features], dim=-1)
        hidden = torch.nn.functional.linear(joined, own["fc.weight"], own.get("fc.bias"))
        hidden = hidden + made.attention(layer, hidden)
        hidden = hidden + made.mlp(layer, hidden)
        return hidden @ target.head.T, hidden

    check(executable, reference)


@pytest.mark.parametrize("backend", ["inductor", "onnxruntime", "torch"])
@pytest.mark.parametrize("norms_residual", [False, True])
def test_eagle3(tmp_path: Path, backend: str, norms_residual: bool) -> None:
    path, _ = tiny_models.checkpoint(tmp_path / "llama", "llama", num_hidden_layers=6)
    tensors = made.eagle3_tensors()
    content = {**made.EAGLE3_CONFIG, "norm_before_residual": norms_residual}
    head = made.write(tmp_path / "eagle3", content, tensors)
    config = SpeculativeConfig(method="eagle3", model=str(head))
    executable, target = drafter(tmp_path, config, path, backend)
    layer = made.part(tensors, "midlayer.")

    def reference(tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        normed = made.rms(features, layer["hidden_norm.weight"])
        embedded = made.rms(target.embedding[tokens], layer["input_layernorm.weight"])
        residual = normed if norms_residual else features
        hidden = residual + made.attention(layer, torch.cat([embedded, normed], dim=-1))
        hidden = hidden + made.mlp(layer, hidden)
        logits = torch.full((len(tokens), made.VOCAB), -torch.inf)
        drafted = made.rms(hidden, tensors["norm.weight"]) @ tensors["lm_head.weight"].T
        logits[:, made.drafted_ids()] = drafted
        return logits, hidden

    check(executable, reference)


@backends
def test_mtp_of_mimo(tmp_path: Path, backend: str) -> None:
    path, _ = tiny_models.checkpoint(tmp_path / "qwen2", "qwen2", rms_norm_eps=made.EPSILON)
    tensors = made.add_mimo_layer(path)
    executable, target = drafter(tmp_path, SpeculativeConfig(method="mtp"), path, backend)

    def reference(tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        embedded = target.embedding[tokens].clone()
        embedded[0] = 0
        parts = [
            made.rms(features, tensors["hidden_layernorm.weight"]),
            made.rms(embedded, tensors["token_layernorm.weight"]),
        ]
        hidden = torch.cat(parts, dim=-1) @ tensors["input_proj.weight"].T
        normed = made.rms(hidden, tensors["input_layernorm.weight"])
        hidden = hidden + made.attention(tensors, normed)
        hidden = hidden + made.mlp(tensors, hidden)
        hidden = made.rms(hidden, tensors["final_layernorm.weight"])
        return hidden @ target.head.T, hidden

    check(executable, reference)


@backends
def test_mtp_of_deepseek(tmp_path: Path, backend: str) -> None:
    """The decoder layer is transformers' own, run eagerly; what is around it is written out."""
    path, model = tiny_models.checkpoint(
        tmp_path / "deepseek", "deepseek_v3", rms_norm_eps=made.EPSILON, first_k_dense_replace=1
    )
    tensors = made.add_deepseek_layer(path)
    executable, target = drafter(tmp_path, SpeculativeConfig(method="mtp"), path, backend)
    config: Any = model.config
    config._attn_implementation = "eager"
    layer = DeepseekV3DecoderLayer(config, 2).eval()
    state = {name: tensors[name] for name in layer.state_dict() if name in tensors}
    for name, stack in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        experts = [
            torch.cat([tensors[f"mlp.experts.{e}.{one}.weight"] for one in stack])
            for e in range(config.n_routed_experts)
        ]
        state[f"mlp.experts.{name}"] = torch.stack(experts)
    layer.load_state_dict(state)
    rotary: Any = DeepseekV3RotaryEmbedding(config)

    def reference(tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        embedded = target.embedding[tokens].clone()
        embedded[0] = 0
        parts = [
            made.rms(embedded, tensors["enorm.weight"]),
            made.rms(features, tensors["hnorm.weight"]),
        ]
        hidden = (torch.cat(parts, dim=-1) @ tensors["eh_proj.weight"].T)[None]
        at = torch.arange(len(tokens))[None]
        mask = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)[None, None]
        with torch.no_grad():
            decoded = layer(
                hidden,
                attention_mask=mask,
                position_ids=at,
                position_embeddings=rotary(hidden, at),
            )[0]
        normed = made.rms(decoded, tensors["shared_head.norm.weight"])
        return normed @ tensors["shared_head.head.weight"].T, decoded

    check(executable, reference)
