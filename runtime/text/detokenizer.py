"""Text of tokens that arrive one by one: how it is asked for, and who gives it.

A `tokenizer.json` names a chain of decoder stages (Hugging Face tokenizers, `decoders`). For the
chains of nearly all language models the text of a token depends on little but the token, which is
what makes streams exact and cheap:

    ByteLevel                                        detokenizer_bytes.py   GPT-2, Llama 3, Qwen
    Replace, ByteFallback, Fuse, Strip; Metaspace;   detokenizer_pieces.py  Llama 2, Gemma, T5, BERT
    WordPiece; no decoder
    anything else                                    detokenizer_window.py

`Tokenizer.decode` of a whole text runs the same detokenizer, so streamed and whole text are equal
by construction.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from octavo.runtime.text.detokenizer_bytes import ByteLevelDecoder
from octavo.runtime.text.detokenizer_pieces import piece_decoder
from octavo.runtime.text.detokenizer_window import WindowDecoder

if TYPE_CHECKING:
    import tokenizers


class Detokenizer(Protocol):
    """One stream of tokens. The pieces do not depend on how the tokens are cut into pushes."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The next piece: what the new tokens settle, without a character still incomplete."""

    def pending(self) -> str:
        """The text held back, if it is whole characters that only later tokens could undo."""

    def flush(self) -> str:
        """What was held back, as it stands; called once, after the last token."""


class TokenDecoder(Protocol):
    """What a tokenizer makes of token ids; shared by all streams."""

    def detokenizer(self, *, skip_special_tokens: bool) -> Detokenizer:
        """A new stream; ids that the tokenizer does not know have no text."""

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds in the middle of a text: UTF-8, perhaps a part of a character."""

    def settled_bytes(self, token_id: int, *, is_first: bool) -> bytes | None:
        """What a token adds to a text; None if that depends on more than whether it begins it."""


def token_decoder(backend: tokenizers.Tokenizer, special_ids: frozenset[int]) -> TokenDecoder:
    """The cheapest exact way to decode what `backend` encodes."""
    stages = _stages(backend)
    kinds = [stage["type"] for stage in stages]
    if kinds in (["ByteLevel"], ["ByteLevel", "Fuse"]):
        return ByteLevelDecoder(backend, special_ids)
    return piece_decoder(backend, stages, special_ids) or WindowDecoder(backend, special_ids)


def _stages(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """The decoder's stages in their order, as `tokenizer.json` describes them."""
    decoder = backend.decoder
    return [] if decoder is None else _flat(json.loads(decoder.__getstate__()))


def _flat(stage: dict[str, Any]) -> list[dict[str, Any]]:
    if stage["type"] != "Sequence":
        return [stage]
    return [inner for part in stage["decoders"] for inner in _flat(part)]
