"""SmolLM2 with drafters: the same tokens as without, alone and beside requests that have none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from octavo.compiler import BuildConfig, build_engine
from octavo.compiler.config import SpeculativeConfig
from octavo.runtime import LLM, SamplingParams
from tests.e2e.conftest import SMOLLM2
from tests.e2e.prompts import PROMPTS
from tests.parity import feature_drafters as made

HIDDEN, VOCAB, LAYERS = 576, 49152, 30
NUM_TOKENS = 32


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)) * 0.02


def eagle_layer(prefix: str, input_size: int) -> dict[str, torch.Tensor]:
    return {
        f"{prefix}self_attn.q_proj.weight": random(HIDDEN, input_size),
        f"{prefix}self_attn.k_proj.weight": random(192, input_size),
        f"{prefix}self_attn.v_proj.weight": random(192, input_size),
        f"{prefix}self_attn.o_proj.weight": random(HIDDEN, HIDDEN),
        f"{prefix}mlp.gate_proj.weight": random(256, HIDDEN),
        f"{prefix}mlp.up_proj.weight": random(256, HIDDEN),
        f"{prefix}mlp.down_proj.weight": random(HIDDEN, 256),
        f"{prefix}post_attention_layernorm.weight": torch.ones(HIDDEN),
    }


CONFIG = {
    **made.CONFIG,
    "hidden_size": HIDDEN,
    "intermediate_size": 256,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": VOCAB,
    "max_position_embeddings": 8192,
}


def eagle(folder: Path) -> Path:
    tensors = {"fc.weight": random(HIDDEN, 2 * HIDDEN), **eagle_layer("layers.0.", HIDDEN)}
    return made.write(folder / "eagle", CONFIG, tensors)


def eagle3(folder: Path) -> Path:
    """It drafts the first 512 ids, rearranged by nothing."""
    tensors = {"fc.weight": random(HIDDEN, 3 * HIDDEN), **eagle_layer("midlayer.", 2 * HIDDEN)}
    for name in ("midlayer.hidden_norm", "midlayer.input_layernorm", "norm"):
        tensors[f"{name}.weight"] = torch.ones(HIDDEN)
    tensors["lm_head.weight"] = random(512, HIDDEN)
    tensors["d2t"] = torch.zeros(512, dtype=torch.int64)
    return made.write(folder / "eagle3", {**CONFIG, "draft_vocab_size": 512}, tensors)


def medusa(folder: Path) -> Path:
    """Two heads without output embeddings: the model's own serves them."""
    tensors = {}
    for head in range(2):
        tensors[f"{head}.0.linear.weight"] = random(HIDDEN, HIDDEN)
        tensors[f"{head}.0.linear.bias"] = random(HIDDEN)
    path = made.write(folder / "medusa", {"medusa_num_heads": 2, "medusa_num_layers": 1}, tensors)
    (path / "model.safetensors").rename(path / "medusa_lm_head.safetensors")
    return path


def mlp_speculator(folder: Path) -> Path:
    tensors = {"speculator.proj.0.weight": random(16, HIDDEN)}
    for stage in range(2):
        tensors |= {
            f"speculator.emb.{stage}.weight": random(VOCAB, 16),
            f"speculator.head.{stage}.weight": random(VOCAB, 16),
            f"speculator.ln.{stage}.weight": torch.ones(16),
            f"speculator.ln.{stage}.bias": torch.zeros(16),
        }
    tensors["speculator.proj.1.weight"] = random(16, 16)
    config = {"model_type": "mlp_speculator", "emb_dim": HIDDEN, "inner_dim": 16}
    config |= {"vocab_size": VOCAB, "n_predict": 2}
    return made.write(folder / "speculator", config, tensors)


def drafter(method: str, model: Path | str | None, count: int) -> SpeculativeConfig:
    name = None if model is None else str(model)
    return SpeculativeConfig.model_validate(
        {"method": method, "model": name, "num_speculative_tokens": count}
    )


def build(output: Path, *drafters: SpeculativeConfig) -> Path:
    config = BuildConfig(
        model=SMOLLM2, output=output, quantization="int8", use_cache=False, speculative=drafters
    )
    return build_engine(config).path


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("speculation")
    others = build(
        folder / "others",
        drafter("ngram", None, 8),
        drafter("draft_model", SMOLLM2, 4),
        drafter("medusa", medusa(folder), 2),
        drafter("mlp_speculator", mlp_speculator(folder), 2),
    )
    last = build(folder / "last-states", drafter("eagle", eagle(folder), 3))
    fused = build(folder / "fused-states", drafter("eagle3", eagle3(folder), 3))
    methods = ("ngram", "draft_model", "medusa", "mlp_speculator")
    return {**dict.fromkeys(methods, others), "eagle": last, "eagle3": fused}


def generate(llm: LLM, *, alone: bool) -> list[list[int]]:
    params = [
        SamplingParams(
            temperature=0.8 if index % 3 == 2 else 0.0,
            seed=index,
            max_tokens=NUM_TOKENS,
            speculate=index % 4 != 3,
            ignore_eos=True,
        )
        for index in range(len(PROMPTS))
    ]
    if alone:
        outputs = [
            llm.generate(prompt, one)[0]
            for prompt, one in zip(PROMPTS[:3], params[:3], strict=True)
        ]
    else:
        outputs = llm.generate(PROMPTS, params)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    "method", ["ngram", "draft_model", "medusa", "mlp_speculator", "eagle", "eagle3"]
)
def test_drafts_change_no_token(engines: dict[str, Path], method: str) -> None:
    path = engines[method]
    with LLM(path, speculative=False) as llm:
        wanted = generate(llm, alone=False)
    with LLM(path, speculative={"method": method, "adaptive": False}) as llm:
        assert generate(llm, alone=False) == wanted
        assert generate(llm, alone=True) == wanted[:3]
        metrics = llm.metrics()
    assert metrics["spec_decode_num_failures"] == 0
    assert metrics["spec_decode_num_draft_tokens"] > 0
    if method == "draft_model":  # the model drafts for itself: what is rejected was cut off
        drafted = metrics["spec_decode_num_draft_tokens"]
        assert metrics["spec_decode_num_accepted_tokens"] > 0.9 * drafted
