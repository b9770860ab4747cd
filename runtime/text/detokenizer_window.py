"""Text of tokens whose decoder nobody knows more of than that it decodes some tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers

_REPLACEMENT = "\ufffd"
# A text that ends in replacement characters may end in the middle of a character. All of them are
# held back, but no more than this many: then they are bytes that never make a text, and only a last
# incomplete character is kept.
_LONGEST_HOLD = 32
_LONGEST_INCOMPLETE = 3


class WindowDecoder:
    """Decodes with the tokenizer itself."""

    def __init__(self, backend: tokenizers.Tokenizer, special_ids: frozenset[int]) -> None:
        self._backend = backend
        self._special_ids = special_ids

    def detokenizer(self, *, skip_special_tokens: bool) -> WindowDetokenizer:
        hidden_ids = self._special_ids if skip_special_tokens else frozenset()
        return WindowDetokenizer(self._backend, hidden_ids)

    def token_bytes(self, token_id: int) -> bytes:
        return self._backend.decode([token_id], skip_special_tokens=False).encode()

    def settled_bytes(self, token_id: int, *, is_first: bool) -> bytes | None:
        return None


class WindowDetokenizer:
    """Decodes a window over the last tokens, so a piece costs the same however long the text is.

    The window begins at least one piece before the new token: decoders treat the first token of a
    text differently (they strip its space), and that must not happen in the middle.
    """

    def __init__(self, backend: tokenizers.Tokenizer, hidden_ids: frozenset[int]) -> None:
        self._backend = backend
        self._hidden_ids = hidden_ids
        self._window: list[int] = []
        self._last_piece_start = 0  # index in the window where the newest complete piece begins
        self._num_emitted = 0  # characters of the window's text

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join([self._next_piece(token_id) for token_id in token_ids])

    def pending(self) -> str:
        return ""

    def flush(self) -> str:
        text = self._decode()
        piece = text[self._num_emitted :]
        self._num_emitted = len(text)
        return piece

    def _next_piece(self, token_id: int) -> str:
        # An invisible token at the start of a window would let the next one count as the first.
        if token_id in self._hidden_ids or self._backend.id_to_token(token_id) is None:
            return ""
        self._window.append(token_id)
        text = self._decode()
        trailing = len(text) - len(text.rstrip(_REPLACEMENT))
        held = trailing if trailing <= _LONGEST_HOLD else _LONGEST_INCOMPLETE
        settled = max(len(text) - held, self._num_emitted)
        piece = text[self._num_emitted : settled]
        self._num_emitted = settled
        if piece and not trailing:
            self._advance()
        return piece

    def _advance(self) -> None:
        """Drops the tokens before the newest piece from the window."""
        next_start = len(self._window) - self._last_piece_start
        del self._window[: self._last_piece_start]
        self._last_piece_start = next_start
        self._num_emitted = len(self._decode())

    def _decode(self) -> str:
        return self._backend.decode(self._window, skip_special_tokens=False)
