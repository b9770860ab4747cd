"""Text of byte-level tokens: each token is some bytes, the text is all of them read as UTF-8."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers


class ByteLevelDecoder:
    """Knows the bytes of every token; equal to `tokenizers`' ByteLevel decoder for any ids."""

    def __init__(self, backend: tokenizers.Tokenizer, special_ids: frozenset[int]) -> None:
        self._all_bytes = _TokenBytes(backend, hidden_ids=frozenset())
        self._text_bytes = _TokenBytes(backend, hidden_ids=special_ids)

    def detokenizer(self, *, skip_special_tokens: bool) -> BytesDetokenizer:
        return BytesDetokenizer(self._text_bytes if skip_special_tokens else self._all_bytes)

    def token_bytes(self, token_id: int) -> bytes:
        return self._all_bytes[token_id]

    def settled_bytes(self, token_id: int, *, is_first: bool) -> bytes | None:
        return self._all_bytes[token_id]


class _TokenBytes(dict[int, bytes]):
    """token id -> its bytes, looked up once: a table of all would delay the first token."""

    def __init__(self, backend: tokenizers.Tokenizer, hidden_ids: frozenset[int]) -> None:
        super().__init__()
        self._backend = backend
        self._hidden_ids = hidden_ids
        self._byte_of_char = _byte_alphabet()

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        self[token_id] = data = b"" if token_id in self._hidden_ids else self._bytes(token)
        return data

    def _bytes(self, token: str) -> bytes:
        try:
            return bytes([self._byte_of_char[char] for char in token])
        except KeyError:  # an added token, written as the text it is
            return token.encode()


class BytesDetokenizer:
    """Holds back at most the 3 bytes of an incomplete character."""

    def __init__(self, token_bytes: _TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._incomplete = b""

    def push(self, token_ids: Sequence[int]) -> str:
        token_bytes = self._token_bytes
        data = self._incomplete + b"".join([token_bytes[token_id] for token_id in token_ids])
        # Python and Rust replace the same invalid bytes: each longest part that could have begun a
        # character is one U+FFFD (the Unicode Standard, section 3.9).
        text, num_used = codecs.utf_8_decode(data, "replace", False)
        self._incomplete = data[num_used:]
        return text

    def pending(self) -> str:
        return ""

    def flush(self) -> str:
        data, self._incomplete = self._incomplete, b""
        return data.decode("utf-8", "replace")


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte, as GPT-2 chose them (openai/gpt-2, `encoder.py`).

    Printable bytes stand for themselves, the others, in their order, for U+0100 and on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet |= {chr(0x100 + index): byte for index, byte in enumerate(others)}
    return alphabet
