"""Whether a config names a causal language model that transformers can build."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.graphs.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def require_known_model(content: Mapping[str, Any], folder: Path, trust_remote_code: bool) -> None:
    """Checks a `config.json` before transformers reads it, which may ask a question or run code."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = content.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError(
            f"{folder / 'config.json'} names no model_type: take the original one"
        )
    quantization = content.get("quantization_config")
    if quantization:
        method = (
            quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        )
        raise UnsupportedModelError(
            f"{folder} holds weights quantized by {method}, which are not read: "
            "build from the unquantized checkpoint"
        )
    if model_type in CONFIG_MAPPING or (content.get("auto_map") and trust_remote_code):
        return
    if content.get("auto_map"):
        raise _needs_remote_code(folder, model_type, content["auto_map"])
    raise UnsupportedModelError(
        f"{folder} has model_type {model_type!r}, which transformers {_version()} does not know: "
        "upgrade transformers or choose another model"
    )


def require_causal_lm(config: PreTrainedConfig, path: Path, trust_remote_code: bool) -> None:
    """Refuses encoders, encoder-decoders and models saved with another head."""
    from transformers.models.auto import modeling_auto

    auto_map = getattr(config, "auto_map", None) or {}
    if trust_remote_code and "AutoModelForCausalLM" in auto_map:
        return
    expected = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    if expected is None and "AutoModelForCausalLM" in auto_map:
        raise _needs_remote_code(path, config.model_type, auto_map)
    if expected is None:
        raise UnsupportedModelError(
            f"{path} is a {config.model_type} model, which has no causal language model in "
            f"transformers {_version()}: choose a decoder-only model"
        )
    saved = next(iter(config.architectures or ()), None)
    if saved is not None and not _is_language_model(saved, str(expected)):
        raise UnsupportedModelError(
            f"{path} was saved as {saved}, a causal language model of type {config.model_type} is "
            f"{expected}: choose a checkpoint of that class"
        )
    # Only where one class serves both: GPT-NeoX writes is_decoder false and is causal all the same.
    two_sided = config.model_type in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if two_sided and getattr(config, "is_decoder", None) is False:
        raise UnsupportedModelError(
            f"{path} is a {config.model_type} encoder (is_decoder is false), whose tokens see "
            "later ones: choose a decoder-only model"
        )


def _is_language_model(saved: str, expected: str) -> bool:
    # A bare "...Model" may still carry a tied head: whether weights are missing decides later.
    return saved == expected or saved.endswith(("ForCausalLM", "LMHeadModel", "Model"))


def _needs_remote_code(path: Path, model_type: str, auto_map: Any) -> UnsupportedModelError:
    classes = (
        sorted(str(v) for v in auto_map.values()) if isinstance(auto_map, dict) else [auto_map]
    )
    return UnsupportedModelError(
        f"{path} has model_type {model_type!r} and needs its own code ({', '.join(classes)}): "
        "pass --trust-remote-code if you trust it"
    )


def _version() -> str:
    import transformers

    return str(transformers.__version__)
