"""Any tokens and stop strings: the text is what one who sees all of the text would cut out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.runtime.text.output_text import OutputText
from octavo.runtime.text.tokenizer import Tokenizer
from tests.property.made_texts import made_texts
from tests.unit import tokenizer_kinds as kinds

TOKENIZERS = {
    "byte-level": Tokenizer(kinds.byte_level()),
    "trained byte-level": Tokenizer(kinds.trained_byte_level()),
    "llama": Tokenizer(kinds.sentence_piece()),
    "word piece": Tokenizer(kinds.word_piece()),
}
ENCODING_KINDS = ["byte-level", "trained byte-level", "llama"]
exhaustive = settings(max_examples=200, deadline=None, derandomize=True)


def first_match(text: str, stop: Sequence[str], num_exempt: int) -> tuple[int, int, str] | None:
    """(end, order, stop string) of the match that is complete first, looking everywhere."""
    matches = [
        (start + len(string), order, string)
        for order, string in enumerate(stop)
        for start in range(len(text))
        if text.startswith(string, start) and start + len(string) > num_exempt
    ]
    return min(matches, default=None)


def cut(
    tokenizer: Tokenizer, ids: Sequence[int], stop: Sequence[str], *, include: bool, min_tokens: int
) -> tuple[str, str | None, int]:
    """The text, the stop string that ended it and the number of tokens, from complete texts."""
    # A character that is incomplete after them is no text of the first tokens.
    num_exempt = len(tokenizer.decode(ids[:min_tokens]).rstrip("\ufffd"))
    for num_tokens in range(min_tokens + 1, len(ids) + 1):
        text = tokenizer.decode(ids[:num_tokens])
        if match := first_match(text, stop, num_exempt):
            end, _, string = match
            return text[: end if include else end - len(string)], string, num_tokens
    return tokenizer.decode(ids), None, len(ids)


def longest_beginning(text: str, stop: Sequence[str]) -> int:
    """Characters at the end of a text that may go on to become a stop string."""
    return max(
        (n for string in stop for n in range(len(string)) if text.endswith(string[:n])), default=0
    )


def check(
    tokenizer: Tokenizer, ids: Sequence[int], stop: Sequence[str], *, include: bool, min_tokens: int
) -> None:
    final, stopped_by, num_tokens = cut(
        tokenizer, ids, stop, include=include, min_tokens=min_tokens
    )
    output = OutputText(
        tokenizer.detokenizer(),
        stop=stop,
        include_stop_str_in_output=include,
        min_tokens=min_tokens,
    )
    detokenizer = tokenizer.detokenizer()
    settled, streamed = "", ""
    for index, token_id in enumerate(ids[:num_tokens], 1):
        settled += detokenizer.push([token_id])
        got = output.push(token_id)
        assert got == (stopped_by if index == num_tokens else None)
        streamed += output.text_since(len(streamed))
        if got is None:
            held = 0 if include else longest_beginning(settled, stop)
            assert streamed == settled[: len(settled) - held]
    output.finish()
    streamed += output.text_since(len(streamed))
    assert streamed == output.text == final


def stop_strings(data: st.DataObject, text: str) -> list[str]:
    """Parts of the text, which end it, and others that mostly begin to. None has U+FFFD."""
    ends = st.tuples(st.integers(0, len(text)), st.integers(1, 8))
    parts = ends.map(lambda pair: text[pair[0] : pair[0] + pair[1]])
    others = st.text("ab \n한\U0001f600", min_size=1, max_size=6)
    string = st.one_of(parts, others, st.tuples(parts, others).map("".join))
    strings = data.draw(st.lists(string, max_size=4))
    return [string for string in strings if string and "\ufffd" not in string]


@pytest.mark.parametrize("kind", ENCODING_KINDS)
@exhaustive
@given(
    data=st.data(), text=made_texts, include=st.booleans(), min_tokens=st.sampled_from([0, 0, 1, 7])
)
def test_any_text(
    kind: str, data: st.DataObject, text: str, include: bool, min_tokens: int
) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text)
    stop = stop_strings(data, tokenizer.decode(ids))
    check(tokenizer, ids, stop, include=include, min_tokens=min_tokens)


@pytest.mark.parametrize("kind", TOKENIZERS)
@exhaustive
@given(data=st.data(), include=st.booleans(), min_tokens=st.integers(0, 6))
def test_any_tokens(kind: str, data: st.DataObject, include: bool, min_tokens: int) -> None:
    """Invalid bytes, byte tokens in runs and special tokens among them."""
    tokenizer = TOKENIZERS[kind]
    tokens = st.integers(0, min(tokenizer.vocab_size + 2, 400))
    ids = data.draw(st.lists(tokens, max_size=25))
    stop = stop_strings(data, tokenizer.decode(ids))
    check(tokenizer, ids, stop, include=include, min_tokens=min_tokens)


@exhaustive
@given(data=st.data(), text=st.text("ab", max_size=40), include=st.booleans())
def test_stop_strings_that_overlap_themselves(
    data: st.DataObject, text: str, include: bool
) -> None:
    stop = data.draw(st.lists(st.text("ab", min_size=1, max_size=7), max_size=4))
    tokenizer = TOKENIZERS["byte-level"]
    min_tokens = data.draw(st.integers(0, len(text)))
    check(tokenizer, tokenizer.encode(text), stop, include=include, min_tokens=min_tokens)
