"""What every kind of checkpoint offers the compiler."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.compiler.checkpoints import architecture, tokenizer_files

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.tokenization_utils_tokenizers import TokenizersBackend


@dataclass(frozen=True)
class TokenFacts:
    """The special ids of a checkpoint, from its tokenizer, generation config and config."""

    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # any of them ends a sequence
    pad_token_id: int | None
    # Ids from this one on have a row in the embedding but no token: they must never be sampled.
    sampled_vocab_size: int


class Checkpoint(ABC):
    """A local checkpoint whose files were checked; transformers is imported on first need only."""

    def __init__(self, path: Path, *, trust_remote_code: bool = False) -> None:
        self.path = path
        self._trusts_remote_code = trust_remote_code
        self._generation_config: Mapping[str, Any] = {}
        self._notes: list[str] = []

    @property
    def notes(self) -> tuple[str, ...]:
        """What was read but not used, one sentence each; grows as the checkpoint is loaded."""
        return tuple(self._notes)

    @cached_property
    def config(self) -> PreTrainedConfig:
        """The model's config; raises UnsupportedModelError if it is no causal language model."""
        config = self._read_config()
        config.name_or_path = ""  # a path of this machine
        architecture.require_causal_lm(config, self.path, self._trusts_remote_code)
        return config

    @cached_property
    def tokenizer(self) -> TokenizersBackend | None:
        """The fast tokenizer, None if there is none; CheckpointError if it is unusable."""
        return self._read_tokenizer()

    @abstractmethod
    def content_digest(self) -> str:
        """Hex SHA-256 over every file that influences the engine, wherever the checkpoint lies."""

    def gguf_tensors(self) -> Sequence[Any]:
        """Tensors as the `gguf` package's reader has them, with their blocks; none elsewhere."""
        return ()

    @abstractmethod
    def load_model(self, dtype: torch.dtype) -> PreTrainedModel:
        """The model on the CPU, in eval mode, with every weight read from the checkpoint."""

    def write_tokenizer(self, staging: Path) -> tuple[str, ...]:
        """Writes tokenizer.json, chat_template.jinja and generation_config.json if there are any.

        Returns the names written. An engine without tokenizer.json serves token ids.
        """
        names: list[str] = []
        if self.tokenizer is not None:
            names += tokenizer_files.write_tokenizer(self.tokenizer, staging, self._notes)
        names += tokenizer_files.write_generation_config(self._generation_config, staging)
        return tuple(names)

    def token_facts(self) -> TokenFacts:
        tokenizer, generation = self.tokenizer, self._generation_config
        text = self.config.get_text_config()
        vocab_size = int(text.vocab_size)
        # Where both name ends, generation follows its own config and so do we.
        eos = [_first_of("eos_token_id", generation, text), *self._more_eos_token_ids()]
        if tokenizer is None:
            bos = _first_of("bos_token_id", generation, text)
            pad = _first_of("pad_token_id", generation, text)
            sampled = vocab_size
        else:
            eos.append(tokenizer.eos_token_id)
            # A chat template writes the tokenizer's BOS; the config's may be another.
            bos = tokenizer.bos_token_id
            pad = tokenizer.pad_token_id
            sampled = min(vocab_size, 1 + max(tokenizer.get_vocab().values()))
        return TokenFacts(
            bos_token_id=_within(bos, vocab_size),
            eos_token_ids=_ids(eos, vocab_size),
            pad_token_id=_within(pad, vocab_size),
            sampled_vocab_size=sampled,
        )

    @abstractmethod
    def _read_config(self) -> PreTrainedConfig: ...

    @abstractmethod
    def _read_tokenizer(self) -> TokenizersBackend | None: ...

    def _more_eos_token_ids(self) -> Iterable[int]:
        """Ids that this kind of checkpoint names as ends beside the usual places."""
        return ()


def _first_of(name: str, generation: Mapping[str, Any], text: PreTrainedConfig) -> Any:
    value = generation.get(name)
    return value if value is not None else getattr(text, name, None)


def _within(token_id: int | None, vocab_size: int) -> int | None:
    """Configs write -1 for "none", and some name ids that the embedding does not have."""
    return token_id if isinstance(token_id, int) and 0 <= token_id < vocab_size else None


def _ids(values: Iterable[Any], vocab_size: int) -> tuple[int, ...]:
    flat = [i for value in values for i in (value if isinstance(value, list | tuple) else [value])]
    return tuple(sorted({i for i in flat if _within(i, vocab_size) is not None}))
