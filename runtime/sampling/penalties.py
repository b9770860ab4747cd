"""Repetition, frequency and presence penalties, kept up with a history that grows token by token.

Meanings and order are vLLM's. Repetition (https://arxiv.org/abs/1909.05858) looks at the prompt and
the output, frequency and presence (OpenAI's definition) at the output alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from octavo.backends.base import Float32Array, Int32Array
    from octavo.runtime.sampling.logits_processors import LogitsRow
    from octavo.runtime.sampling.sampling_params import SamplingParams

IndexArray = NDArray[np.intp]

_FLOAT32 = np.finfo(np.float32)
_FIRST_CAPACITY = 64


class Penalties:
    """The three penalties of one request.

    What a row gets depends on its history alone; the counts kept from row to row only save work,
    and are corrected when drafts were rejected or a failed step is tried again.
    """

    def __init__(self, params: SamplingParams) -> None:
        # In float32 a penalty next to 0 or infinity must stay a number.
        self._repetition = np.float32(
            min(max(params.repetition_penalty, float(_FLOAT32.tiny)), float(_FLOAT32.max))
        )
        self._frequency = np.float32(params.frequency_penalty)
        self._presence = np.float32(params.presence_penalty)
        self._output = TokenCounts()
        self._prompt: Int32Array | None = None  # [P], that of the two below
        self._prompt_ids: IndexArray = np.empty(0, np.intp)  # distinct ones of the vocabulary
        self._in_prompt: NDArray[np.bool_] = np.empty(0, np.bool_)  # [V]

    def __call__(self, row: LogitsRow) -> None:
        self._output.follow(row.output_token_ids)
        if self._repetition != 1:
            self._penalise_repetition(row)
        ids = self._output.token_ids
        if len(ids) and (self._frequency or self._presence):
            logits = row.editable()
            logits[ids] -= self._frequency * self._output.counts
            logits[ids] -= self._presence

    def _penalise_repetition(self, row: LogitsRow) -> None:
        """Each distinct token once, however often and wherever it stands."""
        self._read_prompt(row.prompt_token_ids, len(row.values))
        output_ids = self._output.token_ids
        ids = np.concatenate([self._prompt_ids, output_ids[~self._in_prompt[output_ids]]])
        if len(ids):
            logits = row.editable()
            values = logits[ids]
            with np.errstate(over="ignore", under="ignore"):
                divided = values / self._repetition
                multiplied = values * self._repetition
            logits[ids] = np.where(values > 0, divided, multiplied)

    def _read_prompt(self, prompt: Int32Array, vocab_size: int) -> None:
        if self._prompt is not None and np.array_equal(self._prompt, prompt):
            return
        self._prompt = prompt.copy()
        # A prompt may hold padding ids of the vocabulary, which have no logit here.
        self._in_prompt = np.zeros(vocab_size, np.bool_)
        self._in_prompt[prompt[prompt < vocab_size]] = True
        self._prompt_ids = np.flatnonzero(self._in_prompt)


class TokenCounts:
    """How often each token stands in a history; following the history costs its changed tokens.

    Distinct tokens are kept in the order of their first appearance, so the last token of the
    history can be taken back without looking at those before it.
    """

    def __init__(self) -> None:
        self._history: Int32Array = np.empty(_FIRST_CAPACITY, np.int32)
        self._length = 0
        self._places: dict[int, int] = {}  # of a token among the distinct ones
        self._token_ids: IndexArray = np.empty(_FIRST_CAPACITY, np.intp)
        self._counts: Float32Array = np.empty(_FIRST_CAPACITY, np.float32)

    @property
    def token_ids(self) -> IndexArray:
        """[D] distinct tokens; a view until `follow` is called again."""
        return self._token_ids[: len(self._places)]

    @property
    def counts(self) -> Float32Array:
        """[D] f32, of `token_ids`."""
        return self._counts[: len(self._places)]

    def follow(self, history: Int32Array) -> None:
        """Counts `history` [O], whatever was counted before."""
        self._cut(self._common_length(history))
        self._reserve(len(history))
        start = self._length
        self._history[start : len(history)] = history[start:]
        self._length = len(history)
        for token in history[start:].tolist():
            place = self._places.get(token)
            if place is None:
                place = self._places[token] = len(self._places)
                self._token_ids[place] = token
                self._counts[place] = 0
            self._counts[place] += 1

    def _cut(self, length: int) -> None:
        """Takes back the tokens after the first `length`."""
        for token in reversed(self._history[length : self._length].tolist()):
            place = self._places[token]
            self._counts[place] -= 1
            if self._counts[place] == 0:
                del self._places[token]
        self._length = length

    def _common_length(self, history: Int32Array) -> int:
        """How many of the counted tokens `history` begins with."""
        length = min(self._length, len(history))
        differs = self._history[:length] != history[:length]
        return int(differs.argmax()) if differs.any() else length

    def _reserve(self, size: int) -> None:
        capacity = len(self._history)
        if size > capacity:
            capacity = max(size, 2 * capacity)
            self._history = np.resize(self._history, capacity)
            self._token_ids = np.resize(self._token_ids, capacity)
            self._counts = np.resize(self._counts, capacity)
