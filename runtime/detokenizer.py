"""Text of tokens that arrive one by one, in pieces that concatenate to the text of all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
# A text that ends in replacement characters may end in the middle of a character. A byte-level
# decoder shows at most three for it; one with byte fallback shows every byte of a run of byte
# tokens as one until the run is valid. So all of them are held back, but no more than this many:
# then they are bytes that never make a text, and only a last incomplete character is kept.
_LONGEST_HOLD = 32
_LONGEST_INCOMPLETE = 3


class Detokenizer:
    """Decodes a window over the last tokens, so a piece costs the same however long the text is.

    The window begins at least one piece before the new tokens: decoders treat the first token of a
    text differently (they strip its space), and that must not happen in the middle.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], is_visible: Callable[[int], bool]
    ) -> None:
        """`decode` gives the text of token ids; `is_visible` is False for ids that have no text."""
        self._decode = decode
        self._is_visible = is_visible
        self._window: list[int] = []
        self._last_piece_start = 0  # index in the window where the newest complete piece begins
        self._num_emitted = 0  # characters of the window's text

    def push(self, token_ids: Sequence[int]) -> str:
        """The next piece: what the new tokens settle, without a character still incomplete."""
        # An invisible token at the start of a window would let the next one count as the first.
        token_ids = [token_id for token_id in token_ids if self._is_visible(token_id)]
        if not token_ids:
            return ""
        self._window += token_ids
        text = self._decode(self._window)
        trailing = len(text) - len(text.rstrip(REPLACEMENT))
        held = trailing if trailing <= _LONGEST_HOLD else _LONGEST_INCOMPLETE
        settled = max(len(text) - held, self._num_emitted)
        piece = text[self._num_emitted : settled]
        self._num_emitted = settled
        if piece and not trailing:
            self._advance()
        return piece

    def flush(self) -> str:
        """What was held back, as it stands; called once, after the last token."""
        text = self._decode(self._window)
        piece = text[self._num_emitted :]
        self._num_emitted = len(text)
        return piece

    def _advance(self) -> None:
        """Drops the tokens before the newest piece from the window."""
        next_start = len(self._window) - self._last_piece_start
        del self._window[: self._last_piece_start]
        self._last_piece_start = next_start
        self._num_emitted = len(self._decode(self._window))
