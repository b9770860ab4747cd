"""The text of one completion while its tokens arrive: what of it may be shown, where it stops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo.runtime.text.stop_strings import ROOT, StopMatch, StopStrings

if TYPE_CHECKING:
    from octavo.runtime.text.detokenizer import Detokenizer


class OutputText:
    """Grows by the text of tokens until a stop string ends it.

    detokenizer                 of this completion alone
    stop                        stop strings; they may span tokens. The one complete first wins; of
                                those complete together, the first in this order (as in vLLM)
    include_stop_str_in_output  end behind the stop string instead of before it
    min_tokens                  a stop string complete in the text of so many tokens does not count

    What is shown is never taken back: a character waits until all its bytes came, and text that may
    become a stop string until it did or cannot any more. A stop string is seen at the token that
    completes it. `push` and `text_since` cost the new text only, `text` all of it.
    RequestError if a stop string is empty.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stop) if stop else None
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._num_exempt_chars = 0  # stop strings that end in them do not count
        self._parts: list[str] = []
        self._num_chars = 0  # of all parts
        self._num_shown = 0  # of these, what may be shown
        self._state = ROOT
        self._stopped_by: str | None = None

    @property
    def text(self) -> str:
        """What may be shown: no part of a stop string that may complete, no half character."""
        self._parts = ["".join(self._parts)]
        return self._parts[0][: self._num_shown]

    @property
    def num_chars(self) -> int:
        """The length of `text`."""
        return self._num_shown

    def text_since(self, start: int) -> str:
        """`text[start:]` without touching what is before it."""
        part_start = self._num_chars
        parts: list[str] = []
        for part in reversed(self._parts):
            if part_start <= start:
                break
            part_start -= len(part)
            parts.append(part)
        last = max(self._num_shown - part_start, 0)
        return "".join(reversed(parts))[max(start - part_start, 0) : last]

    def push(self, token_id: int) -> str | None:
        """Adds a token; the stop string that ended the text, if one did, then and ever after."""
        if self._stopped_by is not None:
            return self._stopped_by
        piece = self._detokenizer.push((token_id,))
        self._num_tokens += 1
        if self._stops is None:
            self._add(piece)
            self._num_shown = self._num_chars
            return None
        # Text held back by the detokenizer may end with a stop string and be the end of the text:
        # a line end as a byte token, say, which further bytes could still make invalid.
        pending = self._detokenizer.pending()
        if self._num_tokens <= self._min_tokens:
            self._num_exempt_chars = self._num_chars + len(piece) + len(pending)
        if piece or pending:
            self._read(self._stops, piece, pending)
        return self._stopped_by

    def finish(self) -> None:
        """Shows what was held back, as it stands, unless a stop string ended the text."""
        if self._stopped_by is None:
            self._add(self._detokenizer.flush())
            self._num_shown = self._num_chars

    def _read(self, stops: StopStrings, piece: str, pending: str) -> None:
        start = self._num_chars
        exempt = self._num_exempt_chars - start
        self._state, match = stops.scan(self._state, piece, after=exempt)
        self._add(piece)
        if match is None and pending:
            start = self._num_chars
            exempt = self._num_exempt_chars - start
            _, match = stops.scan(self._state, pending, after=exempt)
            if match is not None:
                self._add(pending)
        if match is not None:
            self._stop(match, start + match.end)
        elif self._include_stop:
            self._num_shown = self._num_chars
        else:
            self._num_shown = self._num_chars - stops.num_held(self._state)

    def _stop(self, match: StopMatch, end: int) -> None:
        self._stopped_by = match.stop
        self._num_shown = end if self._include_stop else end - len(match.stop)

    def _add(self, piece: str) -> None:
        if piece:
            self._parts.append(piece)
            self._num_chars += len(piece)
