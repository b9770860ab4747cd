"""Loading a model's weights through transformers, with nothing missing and nothing made up."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from octavo.compiler import memory
from octavo.compiler.checkpoints.hf_session import loading
from octavo.graphs.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_SHOWN_NAMES = 3


def load_causal_lm(
    path: Path, folder: Path, **options: Any
) -> tuple[PreTrainedModel, tuple[str, ...]]:
    """The model of the checkpoint at `path`, whose files lie in `folder`, and notes."""
    from transformers import AutoModelForCausalLM

    with loading("the model", path):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(folder),
            # Reported like missing weights instead of a table in an exception.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            local_files_only=True,
            **options,
        )
    model, report = cast("tuple[PreTrainedModel, Mapping[str, Any]]", loaded)
    model.train(False)
    model.config.name_or_path = ""  # a path of this machine
    return model, _notes(path, report, type(model).__name__)


def cast_model(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Casts weights one by one; nothing but a large one's file holds it twice."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point() and tensor.dtype != dtype:
            tensor.data = memory.cast(tensor.data, dtype)
    model.config.dtype = dtype
    return model


def _notes(path: Path, report: Mapping[str, Any], model_class: str) -> tuple[str, ...]:
    """A missing weight would be filled with random numbers: it is refused.

    Tied weights and buffers that the model computes itself are not reported as missing.
    """
    missing = sorted(report["missing_keys"])
    if missing:
        raise CheckpointError(
            f"{path} lacks {len(missing)} of the weights of {model_class} ({_shown(missing)}): "
            "get the complete checkpoint"
        )
    for name, found, expected in sorted(report["mismatched_keys"]):
        raise CheckpointError(
            f"{path} has {name} of shape {list(found)}, its config says {list(expected)}: weights "
            "and config belong to different models"
        )
    if report.get("error_msgs"):
        raise CheckpointError(f"{path} cannot be loaded ({report['error_msgs'][0]})")
    unexpected = sorted(report["unexpected_keys"])
    if not unexpected:
        return ()
    return (f"{len(unexpected)} weights are not part of {model_class} ({_shown(unexpected)})",)


def _shown(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN_NAMES]) + (", ..." if len(names) > _SHOWN_NAMES else "")
