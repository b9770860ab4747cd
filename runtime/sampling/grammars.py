"""Grammars of structured output over one tokenizer's tokens, compiled by llguidance."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from octavo.graphs.errors import RequestError

if TYPE_CHECKING:
    import llguidance

    from octavo.runtime.sampling.structured_outputs import StructuredOutputsParams
    from octavo.runtime.text.token_table import TokenTable
    from octavo.runtime.text.tokenizer import Tokenizer

# The layout of Python's json.dumps, which models write by themselves. Where white space were free,
# a model could write nothing else until its tokens run out.
JSON_LAYOUT: dict[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
_MESSAGE_LENGTH = 300


class Grammar:
    """A compiled grammar; each sequence takes its own matcher, the automaton is shared."""

    def __init__(self, matcher: llguidance.LLMatcher, table: TokenTable) -> None:
        self._matcher = matcher
        self.altered_ids = np.array(table.altered_ids, np.intp)  # see TokenTable

    def matcher(self) -> llguidance.LLMatcher:
        """A matcher at the beginning of a text."""
        return self._matcher.deep_copy()


class GrammarCompiler:
    """Compiles grammars for one tokenizer; what it needs of that is made for the first of them.

    vocab_size  of the rows that the grammars will mask
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._table: TokenTable | None = None
        self._guidance_tokenizer: llguidance.LLTokenizer | None = None

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """RequestError if llguidance is missing, or the grammar is wrong, too large or empty.

        Of one request: an automaton that has outgrown its limits fails for all who share it.
        """
        tokenizer, table = self._tokens()
        import llguidance

        grammar = _source(params)
        limits = llguidance.LLParserLimits(verbose_errors=False)
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        check_matcher(matcher, "cannot be compiled")
        _try_out(matcher.deep_copy(), self._vocab_size)
        return Grammar(matcher, table)

    def _tokens(self) -> tuple[llguidance.LLTokenizer, TokenTable]:
        if self._guidance_tokenizer is None or self._table is None:
            try:
                import llguidance
            except ImportError as error:
                raise RequestError(
                    f"structured_outputs needs llguidance ({error}): install octavo[serve]"
                ) from None
            self._table = self._tokenizer.token_table()
            tokens = _Tokens(self._table, self._vocab_size)
            self._guidance_tokenizer = llguidance.LLTokenizer(tokens)  # type: ignore[arg-type]
        return self._guidance_tokenizer, self._table


class _Tokens:
    """What llguidance asks of a tokenizer.

    Its end-of-sequence token is one of its own behind all others: which tokens end a request is
    the request's matter.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, table: TokenTable, vocab_size: int) -> None:
        missing = max(0, vocab_size - len(table.token_bytes))
        self.tokens = [*table.token_bytes, *([b""] * missing), b"<end of text>"]
        self.eos_token_id = len(self.tokens) - 1
        self.special_token_ids = [*table.special_ids, self.eos_token_id]

    def __call__(self, text: bytes | str) -> list[int]:
        """Asked for where tokens are forced, which `_source` turns off."""
        raise NotImplementedError


def allowed_tokens(matcher: llguidance.LLMatcher, vocab_size: int) -> NDArray[np.bool_]:
    """[V]: which tokens may come next, those that end a text aside."""
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return np.unpackbits(bits, count=vocab_size, bitorder="little").view(np.bool_)


def check_matcher(matcher: llguidance.LLMatcher, what: str) -> None:
    """RequestError if the matcher has met an error, from which it does not recover."""
    if matcher.is_error():
        reason = " ".join(matcher.get_error().removesuffix("<non-verbose/>").split())
        raise RequestError(
            f"the grammar of structured_outputs {what} ({reason[:_MESSAGE_LENGTH]}): "
            "correct or simplify it"
        )


def _try_out(matcher: llguidance.LLMatcher, vocab_size: int) -> None:
    """What is too complex shows at the first tokens: then the request need not start."""
    what = "allows no text or is too complex"
    allowed = allowed_tokens(matcher, vocab_size)
    check_matcher(matcher, what)
    tokens: list[int] = np.flatnonzero(allowed)[:1].tolist()
    if not tokens and not matcher.is_accepting():
        raise RequestError(
            "the grammar of structured_outputs begins with no token of the vocabulary: change it"
        )
    if tokens:
        matcher.consume_tokens(tokens)
        check_matcher(matcher, what)
        allowed_tokens(matcher, vocab_size)
        check_matcher(matcher, what)


def _source(params: StructuredOutputsParams) -> str:
    """The grammar as llguidance takes it."""
    import llguidance

    if params.grammar is not None:
        rules = params.grammar
    elif params.regex is not None:
        rules = f"start: /{llguidance.regex_to_lark(params.regex, '')}/"
    elif params.choice is not None:
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in params.choice)
        rules = f"start: CHOICE\nCHOICE: {texts}"
    else:
        rules = f"start: %json {_schema(params.json)}"
    # Forcing would have the tokenizer cut what the grammar prescribes; the model may cut it itself.
    return llguidance.LLMatcher.grammar_from_lark(f'{rules}\n%llguidance {{"no_forcing": true}}\n')


def _schema(text: object) -> str:
    """A schema with the layout of the JSON; None is that of any object."""
    schema = {"type": "object"} if text is None else json.loads(str(text))
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    own = schema.get("x-guidance")
    layout = JSON_LAYOUT | (own if isinstance(own, dict) else {})
    return json.dumps(schema | {"x-guidance": layout}, ensure_ascii=False)
