"""Keeps an output to a grammar: before each token, all that the grammar does not allow is banned.

Grammars are llguidance's (https://github.com/guidance-ai/llguidance), which follows them byte by
byte through the whole vocabulary; here are its tokenizer, made of Octavo's own, and its place among
the processors of a row.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.graphs.errors import RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    from octavo.backends.base import Int32Array
    from octavo.runtime.sampling.logits_processors import LogitsRow
    from octavo.runtime.sampling.structured_outputs import StructuredOutputsParams
    from octavo.runtime.text.tokenizer import Tokenizer

# White space in a row, in JSON: enough to indent, not enough for a model to go on for ever.
_WHITE_SPACE = r"[ \t\r\n]{0,40}"
# Symbols of a grammar; reading one takes microseconds, and other requests wait.
_MAX_SYMBOLS = 100_000
_MAX_REASON_CHARS = 200


@dataclass(frozen=True)
class GrammarCompiler:
    """Makes grammars for one engine.

    vocab_size     V of the rows to be edited
    eos_token_ids  end an output; ids outside the vocabulary are the absence of one
    """

    tokenizer: Tokenizer
    vocab_size: int
    eos_token_ids: Sequence[int]

    def compile(
        self, params: StructuredOutputsParams, stop_token_ids: Sequence[int]
    ) -> GrammarFollower:
        """To be copied for each sequence. RequestError if the grammar cannot be followed."""
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            raise RequestError(
                f"structured_outputs needs llguidance ({error}): install `octavo[serve]`"
            ) from error
        ends = [*self._eos_token_ids, *stop_token_ids]
        if not ends:
            raise RequestError(
                "structured_outputs is given and the model has no end-of-sequence token: give "
                "stop_token_ids"
            )
        try:
            grammar = _grammar_text(params)
            matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_limits())
        except (TypeError, ValueError) as error:
            raise _refused(str(error)) from None
        if matcher.is_error():
            raise _refused(matcher.get_error())
        return GrammarFollower(matcher, ends, self.vocab_size)

    @property
    def _eos_token_ids(self) -> list[int]:
        return [token_id for token_id in self.eos_token_ids if 0 <= token_id < self.vocab_size]

    @functools.cached_property
    def _tokenizer(self) -> LLTokenizer:
        """Takes a third of a second for 50,000 tokens: for the first request that needs it."""
        from llguidance import LLTokenizer, TokenizerWrapper

        vocabulary = _Vocabulary(self.tokenizer, self.vocab_size, self._eos_token_ids)
        return LLTokenizer(
            TokenizerWrapper(vocabulary),
            n_vocab=self.vocab_size,
            eos_token=self._eos_token_ids or None,
        )


class GrammarFollower:
    """A logits processor that follows one sequence; its own state only saves work.

    Rejected drafts and repeated steps take the history back: the matcher is rolled back with it.
    """

    def __init__(self, matcher: LLMatcher, end_ids: Sequence[int], vocab_size: int) -> None:
        self._matcher = matcher
        self._end_ids = list(end_ids)
        self._vocab_size = vocab_size
        self._history: Int32Array = np.empty(0, np.int32)  # what the matcher has consumed

    def copy(self) -> GrammarFollower:
        """For another sequence; only of one that has followed nothing yet."""
        return GrammarFollower(self._matcher.deep_copy(), self._end_ids, self._vocab_size)

    def __call__(self, row: LogitsRow) -> None:
        self._follow(row.output_token_ids)
        matcher = self._matcher
        allowed = np.zeros(self._vocab_size, np.bool_)
        if not matcher.is_stopped():
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            tokens = np.unpackbits(bits, count=self._vocab_size, bitorder="little")
            allowed = tokens.view(np.bool_)
        if matcher.is_error():
            raise _stopped(matcher.get_error())
        if matcher.is_accepting():
            allowed[self._end_ids] = True
        row.editable()[~allowed] = -np.inf

    def _follow(self, history: Int32Array) -> None:
        """RequestError if the grammar does not allow `history`: after a draft that it forbids."""
        known = self._history
        length = min(len(known), len(history))
        differs = known[:length] != history[:length]
        if differs.any():
            length = int(differs.argmax())
        if length < len(known) and not self._matcher.rollback(len(known) - length):
            raise _stopped(self._matcher.get_error())
        new = history[length:].tolist()
        num_consumed = self._matcher.try_consume_tokens(new) if new else 0
        self._history = history[: length + num_consumed].copy()
        if num_consumed < len(new):
            raise _stopped(f"it does not allow the token {new[num_consumed]}")


class _Vocabulary:
    """What llguidance's `TokenizerWrapper` asks for: each token's bytes as Octavo decodes it."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = sorted(one for one in tokenizer.special_ids if one < vocab_size)
        self.eos_token_id = eos_token_ids[0] if eos_token_ids else 0

    def __call__(self, text: str) -> list[int]:
        """Tokens whose bytes are those of a text in the middle of an output.

        A tokenizer that writes a space before every text has other tokens for it there: then the
        longest ones that fit.
        """
        data = text.encode()
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        if b"".join([self._tokenizer.token_bytes(token_id) for token_id in token_ids]) == data:
            return token_ids
        return self._longest_tokens(data)

    def _longest_tokens(self, data: bytes) -> list[int]:
        """None, where some of the bytes begin no token: then nothing is said about the text."""
        token_ids = []
        while data:
            sizes = range(min(len(data), self._longest), 0, -1)
            size = next((size for size in sizes if data[:size] in self._ids), 0)
            if not size:
                return []
            token_ids.append(self._ids[data[:size]])
            data = data[size:]
        return token_ids

    @functools.cached_property
    def _ids(self) -> dict[bytes, int]:
        special = set(self.special_token_ids)
        return {data: i for i, data in enumerate(self.tokens) if data and i not in special}

    @functools.cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids))


@functools.cache
def _limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(max_grammar_size=_MAX_SYMBOLS, verbose_errors=False)


def _grammar_text(params: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher

    if params.regex is not None:
        return LLMatcher.grammar_from_regex(params.regex)
    if params.grammar is not None:
        return LLMatcher.grammar_from_lark(params.grammar)
    if params.choice is not None:
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in params.choice)
        return LLMatcher.grammar_from_lark(f"start: {texts}")
    schema: Any = {"type": "object"} if params.json is None else params.json
    return LLMatcher.grammar_from_json_schema(
        schema, overrides={"whitespace_pattern": _WHITE_SPACE}
    )


def _refused(reason: str) -> RequestError:
    return RequestError(
        f"structured_outputs cannot be followed ({_brief(reason)}): see docs/structured-output.md"
    )


def _stopped(reason: str) -> RequestError:
    return RequestError(
        f"the grammar of structured_outputs cannot be followed further ({_brief(reason)}): "
        "simplify it"
    )


def _brief(reason: str) -> str:
    line = " ".join(reason.split())
    return line if len(line) <= _MAX_REASON_CHARS else f"{line[:_MAX_REASON_CHARS]}..."
