"""Texts as models write them, and ways to stream them."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from octavo.runtime.text.tokenizer import Tokenizer
from tests.unit.tokenizer_kinds import SCRIPTS


def _slices(text: str) -> st.SearchStrategy[str]:
    ends = st.tuples(st.integers(0, len(text)), st.integers(0, len(text)))
    return ends.map(lambda pair: text[min(pair) : max(pair)])


# Parts of emoji, Korean, Chinese, Arabic and code, bytes that are mostly no text, and anything.
made_texts = st.lists(
    st.one_of(
        *(_slices(text) for text in SCRIPTS.values()),
        st.binary(max_size=12).map(lambda data: data.decode("utf-8", "replace")),
        st.text(max_size=12),
    ),
    max_size=5,
).map("".join)


def streamed(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    step_sizes: Sequence[int],
    *,
    skip_special_tokens: bool = True,
) -> str:
    """The pieces of pushes of these sizes, the last with all that remains."""
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip_special_tokens)
    text, start = "", 0
    for size in [*step_sizes, len(token_ids)]:
        text += detokenizer.push(token_ids[start : start + size])
        start += size
    return text + detokenizer.flush()
