"""Finds stop strings in text that comes in pieces, in one pass over its characters."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.graphs.errors import RequestError

ROOT = 0


@dataclass(frozen=True)
class StopMatch:
    stop: str
    end: int  # characters of the scanned text up to the end of the stop string


class StopStrings:
    """The automaton of Aho and Corasick (1975), "Efficient string matching".

    A state is the longest end of the text that begins a stop string: just what may still complete.
    Its reader keeps the state, so a text costs the same however it is cut into pieces.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        """`stop` in the order of preference; RequestError if one is empty."""
        if "" in stop:
            raise RequestError("stop holds an empty string, every text ends with it: leave it out")
        self._stop = tuple(stop)
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [ROOT]  # the state of the longest shorter end that begins a stop string
        self._found: list[int | None] = [None]  # index of the first stop string that ends here
        self._num_held = [0]
        depth = [0]
        for index, text in enumerate(self._stop):
            self._add(text, index, depth)
        self._link(depth)
        self._first_chars = frozenset(self._next[ROOT])

    def num_held(self, state: int) -> int:
        """Characters at the end of the text that may become a stop string."""
        return self._num_held[state]

    def scan(self, state: int, text: str, *, after: int = 0) -> tuple[int, StopMatch | None]:
        """Reads on from `state`: the new state, and the first match that ends behind `after`.

        The stop string that is complete first wins; of those that end together, the one that comes
        first in `stop`. So it does not matter how the text is cut into pieces.
        """
        if state == ROOT and self._first_chars.isdisjoint(text):
            return ROOT, None
        for end, char in enumerate(text, 1):
            state = self._follow(state, char)
            index = self._found[state]
            if index is not None and end > after:
                return state, StopMatch(self._stop[index], end)
        return state, None

    def _follow(self, state: int, char: str) -> int:
        while state != ROOT and char not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(char, ROOT)

    def _add(self, text: str, index: int, depth: list[int]) -> None:
        state = ROOT
        for length, char in enumerate(text, 1):
            following = self._next[state].get(char)
            if following is None:
                following = self._next[state][char] = len(self._next)
                self._next.append({})
                self._fallback.append(ROOT)
                self._found.append(None)
                self._num_held.append(0)
                depth.append(length)
            state = following
        if self._found[state] is None:
            self._found[state] = index

    def _link(self, depth: Sequence[int]) -> None:
        """Sets where each state falls back to, shortest first, and what follows from that."""
        queue = deque(self._next[ROOT].values())
        while queue:
            state = queue.popleft()
            back = self._fallback[state]
            found = [i for i in (self._found[state], self._found[back]) if i is not None]
            self._found[state] = min(found, default=None)
            # A whole stop string that does not go on waits for nothing, but its end may.
            self._num_held[state] = depth[state] if self._next[state] else self._num_held[back]
            for char, child in self._next[state].items():
                self._fallback[child] = self._follow(back, char)
                queue.append(child)
