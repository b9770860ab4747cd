"""Random EAGLE, EAGLE-3 and MTP checkpoints in their published formats, and what they compute."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from tests.parity import tiny_models

HIDDEN, VOCAB, HEADS, KV_HEADS, HEAD_DIM, INNER = 64, tiny_models.VOCAB_SIZE, 4, 2, 16, 96
EPSILON, THETA = 1e-5, 10000.0

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rms_norm_eps": EPSILON,
    "rope_theta": THETA,
}
NUM_DRAFTED = 50  # tokens of EAGLE-3's own vocabulary


def random(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator) * 0.3


def norm_weight(generator: torch.Generator) -> Tensor:
    return 1 + random(generator, HIDDEN)


def write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "model.safetensors")
    return folder


def layer_tensors(
    generator: torch.Generator, prefix: str, input_size: int = HIDDEN, *, bias: bool = False
) -> dict[str, Tensor]:
    sizes = {"q_proj": HEADS * HEAD_DIM, "k_proj": KV_HEADS * HEAD_DIM}
    sizes["v_proj"] = sizes["k_proj"]
    tensors = {}
    for name, size in sizes.items():
        tensors[f"self_attn.{name}.weight"] = random(generator, size, input_size)
        if bias:
            tensors[f"self_attn.{name}.bias"] = random(generator, size)
    tensors |= {
        "self_attn.o_proj.weight": random(generator, HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj.weight": random(generator, INNER, HIDDEN),
        "mlp.up_proj.weight": random(generator, INNER, HIDDEN),
        "mlp.down_proj.weight": random(generator, HIDDEN, INNER),
        "post_attention_layernorm.weight": norm_weight(generator),
    }
    return {prefix + name: tensor for name, tensor in tensors.items()}


def eagle_tensors(prefix: str = "", *, bias: bool = True) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tensors = layer_tensors(generator, "layers.0.")
    tensors["fc.weight"] = random(generator, HIDDEN, 2 * HIDDEN)
    if bias:
        tensors["fc.bias"] = random(generator, HIDDEN)
    return {prefix + name: tensor for name, tensor in tensors.items()}


def drafted_ids() -> Tensor:
    """The ids of EAGLE-3's own vocabulary, ascending."""
    generator = torch.Generator().manual_seed(3)
    return torch.randperm(VOCAB, generator=generator)[:NUM_DRAFTED].sort().values


def eagle3_tensors(num_layers: int = 3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    tensors = layer_tensors(generator, "midlayer.", 2 * HIDDEN)
    for name in ("midlayer.hidden_norm", "midlayer.input_layernorm", "norm"):
        tensors[f"{name}.weight"] = norm_weight(generator)
    tensors["fc.weight"] = random(generator, HIDDEN, num_layers * HIDDEN)
    tensors["lm_head.weight"] = random(generator, NUM_DRAFTED, HIDDEN)
    tensors["d2t"] = drafted_ids() - torch.arange(NUM_DRAFTED)
    tensors["t2d"] = torch.isin(torch.arange(VOCAB), drafted_ids())
    return tensors


EAGLE3_CONFIG = {**CONFIG, "draft_vocab_size": NUM_DRAFTED}


def add_mimo_layer(folder: Path) -> dict[str, Tensor]:
    """Adds `model.mtp_layers.0` to a saved Qwen2; returns its tensors, without that prefix."""
    generator = torch.Generator().manual_seed(4)
    tensors = layer_tensors(generator, "", bias=True)
    tensors["input_proj.weight"] = random(generator, HIDDEN, 2 * HIDDEN)
    for name in ("token", "hidden", "final", "input"):
        tensors[f"{name}_layernorm.weight"] = norm_weight(generator)
    _add(folder, {f"model.mtp_layers.0.{name}": tensor for name, tensor in tensors.items()})
    return tensors


def add_deepseek_layer(folder: Path, num_layers: int = 2) -> dict[str, Tensor]:
    """Adds the layer behind the last one of a saved DeepSeek-V3: a copy of that, made other."""
    generator = torch.Generator().manual_seed(5)
    last, prefix = f"model.layers.{num_layers - 1}.", f"model.layers.{num_layers}."
    stored = load_file(folder / "model.safetensors")
    tensors = {
        name.removeprefix(last): tensor + 0.1 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in stored.items()
        if name.startswith(last)
    }
    tensors["eh_proj.weight"] = random(generator, HIDDEN, 2 * HIDDEN)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{name}.weight"] = norm_weight(generator)
    tensors["shared_head.head.weight"] = random(generator, VOCAB, HIDDEN)
    _add(folder, {prefix + name: tensor for name, tensor in tensors.items()})
    return tensors


def _add(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    file = folder / "model.safetensors"
    save_file({**load_file(file), **tensors}, file, metadata={"format": "pt"})


def rms(hidden: Tensor, weight: Tensor) -> Tensor:
    return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + EPSILON) * weight


def rotated(heads: Tensor) -> Tensor:
    """[T, H, D], the token at index t turned by its position t."""
    half = heads.shape[-1] // 2
    angles = torch.arange(len(heads))[:, None] * THETA ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = heads[..., :half], heads[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attention(tensors: Mapping[str, Tensor], given: Tensor) -> Tensor:
    """[T, input] -> [T, h]: causal, each KV head serving its group of heads."""

    def heads(name: str, count: int) -> Tensor:
        weight, bias = tensors[f"self_attn.{name}.weight"], tensors.get(f"self_attn.{name}.bias")
        return functional.linear(given, weight, bias).view(-1, count, HEAD_DIM)

    query, key = rotated(heads("q_proj", HEADS)), rotated(heads("k_proj", KV_HEADS))
    group = HEADS // KV_HEADS
    key, value = (x.repeat_interleave(group, 1) for x in (key, heads("v_proj", KV_HEADS)))
    scores = torch.einsum("thd,shd->hts", query, key) * HEAD_DIM**-0.5
    scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf)
    mixed = torch.einsum("hts,shd->thd", scores.softmax(-1), value).reshape(len(given), -1)
    return mixed @ tensors["self_attn.o_proj.weight"].T


def mlp(tensors: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
    normed = rms(hidden, tensors["post_attention_layernorm.weight"])
    gate = functional.silu(normed @ tensors["mlp.gate_proj.weight"].T)
    up = normed @ tensors["mlp.up_proj.weight"].T
    return (gate * up) @ tensors["mlp.down_proj.weight"].T


def part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
