"""Writing a checkpoint's tokenizer as files that the runtime reads without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.compiler.checkpoints.hf_session import loading, quiet_and_offline
from octavo.graphs.errors import CheckpointError

if TYPE_CHECKING:
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"
GENERATION_CONFIG = "generation_config.json"


def read_tokenizer(path: Path, folder: Path, **options: Any) -> TokenizersBackend:
    """transformers' fast tokenizer of the checkpoint at `path`, whose files lie in `folder`."""
    from transformers import AutoTokenizer
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

    with loading("the tokenizer", path, "repair it, or remove its files to serve token ids"):
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, **options)
    if not isinstance(tokenizer, TokenizersBackend):
        raise CheckpointError(
            f"the tokenizer of {path} is a {type(tokenizer).__name__}, which has no {TOKENIZER}: "
            "add a fast tokenizer, or remove its files to build an engine that serves token ids"
        )
    return tokenizer


def write_tokenizer(tokenizer: TokenizersBackend, staging: Path, notes: list[str]) -> list[str]:
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    # Settings left from training: transformers resets them at each call, plain `tokenizers` obeys.
    backend.no_truncation()
    backend.no_padding()
    backend.save(str(staging / TOKENIZER))
    template = _chat_template(tokenizer, notes)
    if template is None:
        return [TOKENIZER]
    (staging / CHAT_TEMPLATE).write_text(template, encoding="utf-8")
    return [TOKENIZER, CHAT_TEMPLATE]


def _chat_template(tokenizer: TokenizersBackend, notes: list[str]) -> str | None:
    template = tokenizer.chat_template
    if template is None or isinstance(template, str):
        return template
    others = sorted(set(template) - {"default"})
    notes.append(f"of several chat templates only the default is kept, not {', '.join(others)}")
    default: str | None = template.get("default")
    return default


def write_generation_config(content: Mapping[str, Any], staging: Path) -> list[str]:
    """Writes the fields that transformers defines: a file may hold anything, paths included."""
    if not content:
        return []
    from transformers import GenerationConfig

    with quiet_and_offline():
        default: Any = GenerationConfig  # its constructor is untyped
        fields = default().to_dict().keys() - {"transformers_version"}
    kept = {k: v for k, v in content.items() if k in fields and not k.startswith("_")}
    text = json.dumps(kept, indent=2, sort_keys=True) + "\n"
    (staging / GENERATION_CONFIG).write_text(text, encoding="utf-8")
    return [GENERATION_CONFIG]
