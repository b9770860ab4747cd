"""Prompts as users write them, checked and turned into token ids."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from octavo.graphs.errors import ContextLengthError, RequestError

if TYPE_CHECKING:
    from octavo.runtime.text.tokenizer import Tokenizer

# A text, {"prompt": text} or {"prompt_token_ids": ids}; with both, the ids are what is run. With
# "cache_salt" the cached prefix is shared only with prompts of the same salt.
Prompt: TypeAlias = str | Mapping[str, object]

_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}


@dataclass(frozen=True)
class EncodedPrompt:
    text: str | None
    token_ids: list[int]
    cache_salt: bytes = b""


@dataclass(frozen=True)
class PromptReader:
    """Checks prompts against one engine; `tokenizer` is None if the engine has none."""

    tokenizer: Tokenizer | None
    vocab_size: int
    max_model_len: int

    def read(self, prompt: Prompt) -> EncodedPrompt:
        """The token ids of one prompt; RequestError if this engine cannot run them."""
        text, ids = _split(prompt)
        token_ids = self._encode(text) if ids is None else self._check_ids(ids)
        if not token_ids:
            raise RequestError("the prompt is empty: give at least one token")
        if len(token_ids) >= self.max_model_len:
            raise ContextLengthError(
                f"the prompt has {len(token_ids)} tokens, the engine takes at most "
                f"{self.max_model_len - 1} and generates up to max_model_len {self.max_model_len}: "
                "shorten it or build an engine with a larger max_model_len"
            )
        salt = "" if isinstance(prompt, str) else prompt.get("cache_salt", "")
        return EncodedPrompt(text, token_ids, _encode_salt(salt))

    def _encode(self, text: str | None) -> list[int]:
        if not text:
            raise RequestError("the prompt is empty: give at least one token")
        if self.tokenizer is None:
            raise RequestError(
                "the engine has no tokenizer and cannot read a text prompt: "
                'give {"prompt_token_ids": [...]}'
            )
        return self.tokenizer.encode(text)

    def _check_ids(self, ids: Iterable[object]) -> list[int]:
        token_ids = []
        for value in ids:
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise RequestError(f"the prompt holds {value!r}, token ids must be integers")
            if not 0 <= value < self.vocab_size:
                raise RequestError(
                    f"the prompt holds the token id {value}, ids must lie in "
                    f"[0, {self.vocab_size}), the engine's vocabulary"
                )
            token_ids.append(int(value))
        return token_ids


def _encode_salt(salt: object) -> bytes:
    if isinstance(salt, str):
        with contextlib.suppress(UnicodeEncodeError):  # lone surrogates
            return salt.encode()
    raise RequestError(f'"cache_salt" is {_brief(salt)}, it must be a text')


def _split(prompt: object) -> tuple[str | None, Iterable[object] | None]:
    if isinstance(prompt, str):
        return prompt, None
    if not isinstance(prompt, Mapping) or not prompt or not set(prompt) <= _KEYS:
        raise RequestError(
            f'the prompt {_brief(prompt)} must be a text, {{"prompt": text}} or '
            '{"prompt_token_ids": [...]}'
        )
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise RequestError(f'"prompt" is {_brief(text)}, it must be a text')
    if ids is not None and (isinstance(ids, str | bytes) or not isinstance(ids, Iterable)):
        raise RequestError(f'"prompt_token_ids" is {_brief(ids)}, it must be a list of token ids')
    return text, ids


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
