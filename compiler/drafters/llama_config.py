"""The config of a drafter whose decoder layer is Llama's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.compiler.checkpoints.hf_folder import read_object
from octavo.compiler.checkpoints.hf_session import loading
from octavo.graphs.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import LlamaConfig


def read_llama_config(folder: Path) -> tuple[LlamaConfig, dict[str, Any]]:
    """The config and the content of its file; CheckpointError where it is of another model."""
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} has no config.json: give the drafter's folder")
    content = read_object(path)
    model_type = content.get("model_type", "llama")
    if model_type != "llama":
        raise CheckpointError(
            f"{path} is of a drafter with {model_type} layers, and only those with llama layers "
            "are known: choose another drafter"
        )
    from transformers import LlamaConfig

    with loading("the config", folder):
        config: LlamaConfig = LlamaConfig.from_dict(content)
    return config, content


def attention_shapes(
    config: LlamaConfig, prefix: str, input_size: int
) -> dict[str, tuple[int, ...]]:
    """Of the tensors of a layer's attention that reads `input_size` numbers."""
    heads = int(config.num_attention_heads)
    head_dim = int(config.head_dim or config.hidden_size // heads)
    queries, keys = heads * head_dim, int(config.num_key_value_heads or heads) * head_dim
    sizes = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, size in sizes.items():
        shapes[f"{prefix}self_attn.{name}.weight"] = (size, input_size)
        if config.attention_bias:
            shapes[f"{prefix}self_attn.{name}.bias"] = (size,)
    shapes[f"{prefix}self_attn.o_proj.weight"] = (config.hidden_size, queries)
    if config.attention_bias:
        shapes[f"{prefix}self_attn.o_proj.bias"] = (config.hidden_size,)
    return shapes


def mlp_shapes(config: Any, prefix: str) -> dict[str, tuple[int, ...]]:
    """Of the tensors of a layer's gated MLP and the norm before it."""
    inner, size = config.intermediate_size, config.hidden_size
    return {
        f"{prefix}mlp.gate_proj.weight": (inner, size),
        f"{prefix}mlp.up_proj.weight": (inner, size),
        f"{prefix}mlp.down_proj.weight": (size, inner),
        f"{prefix}post_attention_layernorm.weight": (size,),
    }
