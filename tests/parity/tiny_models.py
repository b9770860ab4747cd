"""Random models of a few thousand parameters, saved as Hugging Face folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB_SIZE = 256
MAX_POSITIONS = 512

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "num_local_experts": 4, "num_experts": 4}
_GPT2: dict[str, Any] = {
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": MAX_POSITIONS,
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_DEEPSEEK: dict[str, Any] = {
    "head_dim": 8,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
}
_SPECIAL: dict[str, dict[str, Any]] = {
    # A window shorter than the tests' prompts, and scores large enough for the cap to bite.
    "gemma2": {"sliding_window": 24, "query_pre_attn_scalar": 1, "attn_logit_softcapping": 2.0},
    "mistral": {"sliding_window": 24},
    "gpt_oss": {**_EXPERTS, "sliding_window": 24},
    "mixtral": _EXPERTS,
    "deepseek_v3": {**_EXPERTS, **_DEEPSEEK},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}


def config(model_type: str, **overrides: Any) -> transformers.PreTrainedConfig:
    """A tiny config; an override of `...` leaves that key to the class's default."""
    if model_type == "gpt2":
        return AutoConfig.for_model(model_type, **{**_GPT2, **overrides})
    options = {**_COMMON, **_SPECIAL.get(model_type, {}), **overrides}
    return AutoConfig.for_model(model_type, **{k: v for k, v in options.items() if v is not ...})


def model(model_type: str, **overrides: Any) -> PreTrainedModel:
    """A random model in eval mode. Weights are drawn wide, so that attention matters."""
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    made: PreTrainedModel = auto.from_config(config(model_type, **overrides)).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.dim() >= 2 and "embed" not in name:
                parameter.mul_(5)
            elif "sinks" in name:
                parameter.normal_()
    return made


def checkpoint(folder: Path, model_type: str, **overrides: Any) -> tuple[Path, PreTrainedModel]:
    """A random model saved to `folder`, without a tokenizer."""
    made = model(model_type, **overrides)
    made.save_pretrained(folder)
    return folder, made
