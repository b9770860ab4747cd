"""Text of SentencePiece-style tokens: every token is a piece of text, or one byte of a run."""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import tokenizers

# A run of byte tokens is text if all of it is valid UTF-8; otherwise every byte of it, those of
# valid characters too, is a replacement character. So a run is held back until it ends or becomes
# invalid, but no more than this many bytes of it: then its whole characters are text for good.
LONGEST_HELD_RUN = 32
_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class PieceRule(Protocol):
    """How a decoder turns one token into text."""

    @property
    def is_settled(self) -> bool:
        """Whether a token's text after another one is the same after any other."""

    def text(self, token: str, *, is_first: bool) -> str:
        """`is_first` tells the first token that has any text."""


@dataclass(frozen=True)
class Replacing:
    """`Replace` stages, which treat every token alike."""

    replacements: tuple[tuple[str, str], ...]

    @property
    def is_settled(self) -> bool:
        return True

    def text(self, token: str, *, is_first: bool) -> str:
        for pattern, content in self.replacements:
            token = token.replace(pattern, content)
        return token


@dataclass(frozen=True)
class Spacing:
    """Decoders that space the first token differently: Metaspace, WordPiece and none at all."""

    decoder: tokenizers.decoders.Decoder | None

    @property
    def is_settled(self) -> bool:
        """Of Metaspace; with the others a text is words, and no grammar knows where they end."""
        return type(self.decoder).__name__ == "Metaspace"

    def text(self, token: str, *, is_first: bool) -> str:
        if self.decoder is None:
            return token if is_first else " " + token
        return self.decoder.decode([token] if is_first else ["", token])


class PieceDecoder:
    """Equal to the decoder it stands for, save runs that become invalid after `LONGEST_HELD_RUN`.

    There that decoder takes back what it said before, which no stream can.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_ids: frozenset[int],
        rule: PieceRule,
        *,
        byte_fallback: bool = False,  # tokens such as <0x0A> are bytes
        strip_char: str = " ",
        num_strip: int = 0,
    ) -> None:
        """`num_strip` of `strip_char` are taken off the beginning of the text."""
        self._backend = backend
        self._special_ids = special_ids
        self._rule = rule
        self._byte_fallback = byte_fallback
        self._pieces: dict[int, str | bytes] = {}
        self.strip_char = strip_char
        self.num_strip = num_strip

    def detokenizer(self, *, skip_special_tokens: bool) -> PiecesDetokenizer:
        return PiecesDetokenizer(self, self._special_ids if skip_special_tokens else frozenset())

    def token_bytes(self, token_id: int) -> bytes:
        piece = self.piece(token_id) or b""
        return piece if isinstance(piece, bytes) else piece.encode()

    def settled_bytes(self, token_id: int, *, is_first: bool) -> bytes | None:
        if not self._rule.is_settled:
            return None
        piece = self.piece(token_id) or ""
        if is_first and not isinstance(piece, bytes):
            piece = self.first_piece(token_id)
        data = piece if isinstance(piece, bytes) else piece.encode()
        # How much is stripped may depend on the tokens after it: at least not all of it is text.
        strips = is_first and self.num_strip and data.startswith(self.strip_char.encode())
        return b"" if strips else data

    def piece(self, token_id: int) -> str | bytes | None:
        """A token's text after another one, or the byte it is; None if it is unknown."""
        piece = self._pieces.get(token_id)
        if piece is None:
            token = self._backend.id_to_token(token_id)
            if token is None:
                return None
            piece = self._rule.text(token, is_first=False)
            if self._byte_fallback and (byte := _BYTE_TOKEN.fullmatch(piece)):
                piece = bytes.fromhex(byte[1])
            self._pieces[token_id] = piece
        return piece

    def first_piece(self, token_id: int) -> str:
        """The text of a token that is no byte, at the beginning of a text."""
        return self._rule.text(self._backend.id_to_token(token_id) or "", is_first=True)


class PiecesDetokenizer:
    """Holds back a run of byte tokens until it is known to be text or not."""

    def __init__(self, decoder: PieceDecoder, hidden_ids: frozenset[int]) -> None:
        self._decoder = decoder
        self._hidden_ids = hidden_ids
        self._is_first = True
        self._num_strip = decoder.num_strip
        self._run = b""  # the bytes held back, a valid beginning of UTF-8 text
        self._run_is_invalid = False  # then every further byte of it is a replacement character

    def push(self, token_ids: Sequence[int]) -> str:
        text = "".join([self._next_text(token_id) for token_id in token_ids])
        if self._num_strip and text:
            text, self._num_strip = self._strip(text)
        return text

    def pending(self) -> str:
        run, num_used = codecs.utf_8_decode(self._run, "strict", False)
        return self._strip(run)[0] if num_used == len(self._run) else ""

    def flush(self) -> str:
        text, self._num_strip = self._strip(self._end_run())
        return text

    def _next_text(self, token_id: int) -> str:
        piece = None if token_id in self._hidden_ids else self._decoder.piece(token_id)
        if piece is None:
            return ""
        if isinstance(piece, bytes):
            return self._add_byte(piece)
        if self._is_first:
            self._is_first = False
            piece = self._decoder.first_piece(token_id)
        return self._end_run() + piece if self._run or self._run_is_invalid else piece

    def _add_byte(self, byte: bytes) -> str:
        self._is_first = False
        if self._run_is_invalid:
            return _REPLACEMENT
        self._run += byte
        try:
            text, num_used = codecs.utf_8_decode(self._run, "strict", False)
        except UnicodeDecodeError:
            text = _REPLACEMENT * len(self._run)
            self._run, self._run_is_invalid = b"", True
            return text
        if len(self._run) < LONGEST_HELD_RUN:
            return ""
        self._run = self._run[num_used:]
        return text

    def _end_run(self) -> str:
        run, self._run, self._run_is_invalid = self._run, b"", False
        try:
            return run.decode()
        except UnicodeDecodeError:
            return _REPLACEMENT * len(run)

    def _strip(self, text: str) -> tuple[str, int]:
        """The text without what is still to be taken off it, and how much remains to be."""
        num_found = len(text) - len(text.lstrip(self._decoder.strip_char))
        if num_found < len(text):  # another character ends the stripping
            return text[min(num_found, self._num_strip) :], 0
        num_taken = min(num_found, self._num_strip)
        return text[num_taken:], self._num_strip - num_taken


def piece_decoder(
    backend: tokenizers.Tokenizer,
    stages: Sequence[Mapping[str, Any]],
    special_ids: frozenset[int],
) -> PieceDecoder | None:
    """The decoder for a chain of stages (as in `tokenizer.json`); None if it is another kind."""
    if _kinds(stages) in ([], ["Metaspace"], ["WordPiece"]):
        return PieceDecoder(backend, special_ids, Spacing(backend.decoder))
    rest = list(stages)
    replacements = []
    # A pattern that is an expression has no "String" and is left over.
    while _kinds(rest[:1]) == ["Replace"] and (pattern := rest[0]["pattern"].get("String")):
        replacements.append((pattern, rest.pop(0)["content"]))
    byte_fallback = _kinds(rest[:1]) == ["ByteFallback"]
    if byte_fallback:
        del rest[0]
    strips = _kinds(rest) == ["Fuse", "Strip"] and rest[1]["stop"] == 0
    strip: Mapping[str, Any] = rest.pop() if strips else {"content": " ", "start": 0}
    if _kinds(rest) not in ([], ["Fuse"]):
        return None
    return PieceDecoder(
        backend,
        special_ids,
        Replacing(tuple(replacements)),
        byte_fallback=byte_fallback,
        strip_char=strip["content"],
        num_strip=strip["start"],
    )


def _kinds(stages: Sequence[Mapping[str, Any]]) -> list[str]:
    return [stage["type"] for stage in stages]
