"""Edits of a row of logits before a token is chosen from it, each row with its own history.

Most requests have none, and their rows are sampled as they are. The order is vLLM's: allowed
tokens, bad words, min_tokens, logit_bias, the request's own callables, penalties. The grammar of
structured output, which vLLM applies first, comes last: nothing can allow again what it forbids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from octavo.graphs.errors import RequestError
from octavo.runtime.sampling.grammar_mask import GrammarMask
from octavo.runtime.sampling.penalties import Penalties

if TYPE_CHECKING:
    from octavo.backends.base import Float32Array, Int32Array
    from octavo.runtime.sampling.grammars import Grammar
    from octavo.runtime.sampling.sampling_params import SamplingParams

IndexArray = NDArray[np.intp]
_Scalar = TypeVar("_Scalar", bound=np.generic)


class LogitsRow:
    """One row of logits on its way to the sampler; copied when it is first edited.

    prompt_token_ids  [P] i32, read-only
    output_token_ids  [O] i32, read-only: the tokens before the one to be chosen, with the drafts
                      that this row takes for granted

    Token ids of an edit are one id or a sequence; one that the row lacks is a RequestError.
    """

    def __init__(
        self, logits: Float32Array, prompt_token_ids: Int32Array, output_token_ids: Int32Array
    ) -> None:
        self.prompt_token_ids = _read_only(prompt_token_ids)
        self.output_token_ids = _read_only(output_token_ids)
        self._values = logits
        self._edited = False

    @property
    def values(self) -> Float32Array:
        """[V] f32 to sample from: the very array given as long as nothing was edited."""
        return self._values

    @property
    def logits(self) -> Float32Array:
        """[V] f32, read-only: the values as edited up to now."""
        return _read_only(self._values)

    def add(self, token_ids: ArrayLike, values: ArrayLike) -> None:
        """Adds to the logits of `token_ids`, for an id given twice both values."""
        ids = self._indices(token_ids)
        np.add.at(self.editable(), ids, _checked_values(values))

    def assign(self, token_ids: ArrayLike, values: ArrayLike) -> None:
        """Replaces the logits of `token_ids`; -inf forbids a token."""
        ids = self._indices(token_ids)
        self.editable()[ids] = _checked_values(values)

    def ban(self, token_ids: ArrayLike) -> None:
        """Forbids `token_ids`."""
        ids = self._indices(token_ids)
        self.editable()[ids] = -np.inf

    def keep_only(self, token_ids: ArrayLike) -> None:
        """Forbids every token but `token_ids`."""
        ids = self._indices(token_ids)
        kept = np.full_like(self._values, -np.inf)
        kept[ids] = self._values[ids]
        self._values = kept
        self._edited = True

    def editable(self) -> Float32Array:
        """[V] f32 to be edited in place, of which nothing is checked."""
        if not self._edited:
            self._values = self._values.copy()
            self._edited = True
        return self._values

    def _indices(self, token_ids: ArrayLike) -> IndexArray:
        ids = np.asarray(token_ids)
        if ids.size == 0:
            return np.empty(0, np.intp)
        if ids.dtype.kind not in "iu":
            raise RequestError(f"token ids of type {ids.dtype} edit a row: give integers")
        vocab_size = len(self._values)
        # numpy would count negative ids from the end.
        if ids.min() < 0 or ids.max() >= vocab_size:
            wrong = ids.min() if ids.min() < 0 else ids.max()
            raise RequestError(
                f"token id {wrong} of an edit lies outside the vocabulary of {vocab_size}: "
                "give ids from 0 to below that"
            )
        return ids.astype(np.intp, copy=False)


LogitsProcessor = Callable[[LogitsRow], None]


def apply_processors(processors: Iterable[LogitsProcessor], row: LogitsRow) -> None:
    """Edits `row` by each processor in turn; RequestError if one of the request's own fails."""
    for processor in processors:
        processor(row)


def make_processors(
    params: SamplingParams,
    *,
    eos_token_ids: Sequence[int],
    vocab_size: int,
    encode: Callable[[str], Sequence[int]] | None,
    grammar: Grammar | None = None,
) -> tuple[LogitsProcessor, ...]:
    """The processors of one request, none for most; `params` have passed `check_vocabulary`.

    eos_token_ids  the model's; ids outside the vocabulary are the absence of one
    vocab_size     V of the rows to be edited
    encode         token ids of a text without special tokens, None if there is no tokenizer
    grammar        compiled, of `structured_outputs`

    RequestError if bad_words cannot be told in tokens.
    """
    processors: list[LogitsProcessor] = []
    if params.allowed_token_ids is not None:
        processors.append(AllowedTokens(params.allowed_token_ids))
    if params.bad_words:
        processors.append(BadWords(_bad_sequences(params.bad_words, vocab_size, encode)))
    if params.min_tokens > 0:
        # As in vLLM also with ignore_eos: the tokens are not to be generated, not just overlooked.
        ends = {*eos_token_ids, *params.stop_token_ids}
        known_ends = sorted(token for token in ends if 0 <= token < vocab_size)
        processors.append(MinTokens(params.min_tokens, known_ends))
    if params.logit_bias:
        processors.append(LogitBias(params.logit_bias_items))
    processors += [CustomProcessor(processor) for processor in params.logits_processors]
    if params.has_penalties:
        processors.append(Penalties(params))
    if grammar is not None:
        processors.append(
            GrammarMask(
                grammar,
                eos_token_ids=[token for token in eos_token_ids if 0 <= token < vocab_size],
                stop_token_ids=params.stop_token_ids,
                ignore_eos=params.ignore_eos,
            )
        )
    return tuple(processors)


class AllowedTokens:
    """Forbids all tokens but a few."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = np.array(token_ids, np.intp)

    def __call__(self, row: LogitsRow) -> None:
        row.keep_only(self._token_ids)


class BadWords:
    """Forbids the last token of each sequence where the output ends with the ones before it."""

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        self._always: list[int] = []
        # By the token before the last, which is all that most rows need to be asked about.
        self._beginnings: dict[int, list[tuple[list[int], int]]] = {}
        for sequence in sequences:
            *beginning, last = sequence
            if beginning:
                self._beginnings.setdefault(beginning[-1], []).append((beginning, last))
            else:
                self._always.append(last)

    def __call__(self, row: LogitsRow) -> None:
        output = row.output_token_ids
        banned = list(self._always)
        if len(output):
            for beginning, last in self._beginnings.get(int(output[-1]), ()):
                if output[-len(beginning) :].tolist() == beginning:
                    banned.append(last)
        if banned:
            row.ban(banned)


class MinTokens:
    """Forbids the tokens that end a request until its output, the prompt aside, is long enough."""

    def __init__(self, min_tokens: int, token_ids: Sequence[int]) -> None:
        self._min_tokens = min_tokens
        self._token_ids = np.array(token_ids, np.intp)

    def __call__(self, row: LogitsRow) -> None:
        if len(self._token_ids) and len(row.output_token_ids) < self._min_tokens:
            row.ban(self._token_ids)


class LogitBias:
    """Adds a fixed value to the logits of a few tokens."""

    def __init__(self, items: Sequence[tuple[int, float]]) -> None:
        self._token_ids = np.array([token_id for token_id, _ in items], np.intp)
        self._values = np.array([value for _, value in items], np.float32)

    def __call__(self, row: LogitsRow) -> None:
        row.add(self._token_ids, self._values)


class CustomProcessor:
    """One of the request's own callables: whatever it raises is that request's error alone."""

    def __init__(self, processor: LogitsProcessor) -> None:
        self._processor: Callable[[LogitsRow], Any] = processor
        self._name = getattr(processor, "__qualname__", type(processor).__qualname__)

    def __call__(self, row: LogitsRow) -> None:
        try:
            result = self._processor(row)
        except Exception as error:
            raise RequestError(
                f"the logits processor {self._name} failed ({type(error).__name__}: {error})"
            ) from error
        if result is not None:
            raise RequestError(
                f"the logits processor {self._name} returned a value of type "
                f"{type(result).__name__}, it must return nothing: edit the row by its add, "
                "assign, ban or keep_only"
            )


def _bad_sequences(
    words: Iterable[str], vocab_size: int, encode: Callable[[str], Sequence[int]] | None
) -> list[tuple[int, ...]]:
    """The tokens of each word as it begins a text and as it stands after a space.

    vLLM leaves the second out where the two differ in length; then " word" as one token would get
    through.
    """
    if encode is None:
        raise RequestError("bad_words needs a tokenizer and the engine has none: use logit_bias")
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip()
        first = tuple(encode(bare))
        if not first:
            raise RequestError(f"the bad word {word!r} has no tokens: give words with letters")
        sequences[first] = None
        sequences[tuple(encode(f" {bare}"))] = None
    return [s for s in sequences if s and all(0 <= token < vocab_size for token in s)]


def _checked_values(values: ArrayLike) -> Float32Array:
    with np.errstate(over="ignore"):
        checked = np.asarray(values, np.float32)
    if not (checked < np.inf).all():
        raise RequestError("a value of an edit is nan or inf: give finite numbers, or -inf to ban")
    return checked


def _read_only(array: NDArray[_Scalar]) -> NDArray[_Scalar]:
    view = array.view()
    view.flags.writeable = False
    return view
