"""A folder as `save_pretrained` writes it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.backends.bundle import MANIFEST_NAME, sha256_of
from octavo.compiler import memory
from octavo.compiler.checkpoints import safetensors_files, tokenizer_files
from octavo.compiler.checkpoints.architecture import require_known_model
from octavo.compiler.checkpoints.base import Checkpoint
from octavo.compiler.checkpoints.hf_session import loading
from octavo.compiler.checkpoints.weights import cast_model, load_causal_lm
from octavo.graphs.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

# Without one of these, transformers would make up an empty tokenizer from the config alone.
_VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "*.tiktoken",
    "tiktoken.model",
)
_SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
_MORE_TEMPLATES = "additional_chat_templates/*.jinja"


class HfFolder(Checkpoint):
    def __init__(self, path: Path, *, trust_remote_code: bool = False) -> None:
        super().__init__(path, trust_remote_code=trust_remote_code)
        self._config_content = self._read_config_json()
        if (path / "adapter_config.json").is_file():
            raise CheckpointError(
                f"{path} holds a PEFT adapter: merge it into its base model first"
            )
        generation = path / tokenizer_files.GENERATION_CONFIG
        self._generation_config = read_object(generation) if generation.is_file() else {}
        named = self._config_content.get("transformers_weights")
        self._weights = safetensors_files.weight_files(path, str(named) if named else None)

    def content_digest(self) -> str:
        files = sorted({*self._weights, *self._influencing_files()})
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            digests = pool.map(sha256_of, files)
            lines = [
                f"{f.relative_to(self.path).as_posix()} {d}\n"
                for f, d in zip(files, digests, strict=True)
            ]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def load_model(self, dtype: torch.dtype) -> PreTrainedModel:
        stored = self._stored_dtype() if memory.keeps_weights_in_files() else None
        model, notes = load_causal_lm(
            self.path,
            self.path,
            config=self.config,
            dtype=stored or dtype,
            use_safetensors=True,
            trust_remote_code=self._trusts_remote_code,
        )
        self._notes += notes
        return model if stored in (None, dtype) else cast_model(model, dtype)

    def _stored_dtype(self) -> torch.dtype | None:
        """The one dtype of all weights, which transformers then maps instead of converting them."""
        import torch

        files = [file for file in self._weights if file.suffix == ".safetensors"]
        found = set().union(*map(safetensors_files.dtypes, files))
        names = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
        return names.get(found.pop()) if len(found) == 1 else None

    def _read_config(self) -> PreTrainedConfig:
        from transformers import AutoConfig

        require_known_model(self._config_content, self.path, self._trusts_remote_code)
        with loading("the config", self.path):
            config: PreTrainedConfig = AutoConfig.from_pretrained(
                str(self.path), local_files_only=True, trust_remote_code=self._trusts_remote_code
            )
        return config

    def _read_tokenizer(self) -> TokenizersBackend | None:
        if not any(file.is_file() for name in _VOCABULARIES for file in self.path.glob(name)):
            return None
        return tokenizer_files.read_tokenizer(
            self.path, self.path, trust_remote_code=self._trusts_remote_code
        )

    def _read_config_json(self) -> dict[str, Any]:
        path = self.path / "config.json"
        if path.is_file():
            return read_object(path)
        if (self.path / "adapter_config.json").is_file():
            raise CheckpointError(
                f"{self.path} holds only a PEFT adapter: merge it into its base model first"
            )
        if (self.path / MANIFEST_NAME).is_file():
            raise CheckpointError(f"{self.path} is a built engine, not a checkpoint to build from")
        ggufs = sorted(self.path.glob("*.gguf"))
        hint = f"give the file {ggufs[0]}" if ggufs else "give the folder that holds it"
        raise CheckpointError(f"{self.path} has no config.json: {hint}")

    def _influencing_files(self) -> Iterator[Path]:
        """More may be listed than is read: that costs a rebuild, one too few a wrong engine."""
        patterns = [*_SMALL_FILES, _MORE_TEMPLATES]
        if self._trusts_remote_code:
            patterns.append("**/*.py")
        for pattern in patterns:
            yield from (path for path in self.path.glob(pattern) if path.is_file())


def read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no valid JSON ({error}): download it again") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is no JSON object: download it again")
    return content
