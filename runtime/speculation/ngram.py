"""Prompt lookup: what followed the last tokens when they came before is likely to follow again."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from octavo.backends.base import Int32Array
from octavo.runtime.request import Request
from octavo.runtime.speculation.drafter import ComputedStep, DraftContext, Proposal


class NgramIndex:
    """Where each n-gram of one sequence ended last, for n in [least, most].

    Every token is read once, however often the index is asked.
    """

    def __init__(self, least: int, most: int) -> None:
        self._lengths = range(least, most + 1)
        self._ends: dict[bytes, int] = {}  # n-grams of all lengths: their sizes differ
        self._num_tokens = 0
        self._found = 0

    def find(self, tokens: Int32Array) -> int:
        """The position after the latest earlier occurrence of the longest suffix that has one.

        `tokens` [N] begin with those of the last call. 0 where no suffix came before.
        """
        for end in range(self._num_tokens + 1, len(tokens) + 1):
            found = 0
            for length in self._lengths:
                if length > end:
                    break
                key = tokens[end - length : end].tobytes()
                found = self._ends.get(key, 0) or found
                self._ends[key] = end
            self._found = found
        self._num_tokens = len(tokens)
        return self._found


class NgramDrafter:
    """sampled_vocab_size  ids from this one on are never sampled, so never proposed"""

    method = "ngram"

    def __init__(
        self, prompt_lookup_min: int, prompt_lookup_max: int, *, sampled_vocab_size: int
    ) -> None:
        self._bounds = prompt_lookup_min, prompt_lookup_max
        self._vocab_size = sampled_vocab_size
        self._indices: WeakKeyDictionary[Request, NgramIndex] = WeakKeyDictionary()

    def propose(self, step: ComputedStep, contexts: Sequence[DraftContext]) -> list[Proposal]:
        return [self._propose(context.request, context.num_tokens) for context in contexts]

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """It has no cache."""

    def close(self) -> None:
        self._indices.clear()

    def _propose(self, request: Request, most: int) -> Proposal:
        index = self._indices.get(request)
        if index is None:
            index = self._indices[request] = NgramIndex(*self._bounds)
        tokens = request.tokens(0, request.num_tokens)
        start = index.find(tokens)
        if not start:
            return Proposal()
        following = tokens[start : start + most].tolist()
        while len(following) < most:  # the text is periodic, with what was found
            following += following[: most - len(following)]
        for place, token in enumerate(following):
            if token >= self._vocab_size:
                return Proposal(following[:place])
        return Proposal(following)
