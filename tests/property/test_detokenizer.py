"""Any bytes, cut into tokens and steps anywhere: the pieces concatenate to the full text."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.runtime.tokenizer import Tokenizer
from tests.unit.test_runtime_tokenizer import byte_level, sentence_piece

BYTE_LEVEL = Tokenizer(byte_level())
SENTENCE_PIECE = Tokenizer(sentence_piece(), bos_token_id=1)
SENTENCE_PIECE_TEXT_IDS = [0, 1, 2, *range(259, 265)]


def check(tokenizer: Tokenizer, ids: list[int], sizes: list[int]) -> None:
    detokenizer = tokenizer.detokenizer()
    pieces, start = [], 0
    for size in [*sizes, len(ids)]:
        pieces.append(detokenizer.push(ids[start : start + size]))
        start += size
    pieces.append(detokenizer.flush())
    assert "".join(pieces) == tokenizer.decode(ids)


sizes = st.lists(st.integers(0, 9), max_size=60)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(text=st.text(max_size=40), step_sizes=sizes, cut=st.integers(0, 3))
def test_any_text_and_a_cut_in_it(text: str, step_sizes: list[int], cut: int) -> None:
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False)
    check(BYTE_LEVEL, ids[: len(ids) - cut], step_sizes)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(ids=st.lists(st.integers(0, 259), max_size=40), step_sizes=sizes)
def test_any_bytes_valid_or_not(ids: list[int], step_sizes: list[int]) -> None:
    """Special tokens and ids outside the vocabulary among them."""
    check(BYTE_LEVEL, ids, step_sizes)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    parts=st.lists(
        st.one_of(
            st.sampled_from(SENTENCE_PIECE_TEXT_IDS).map(lambda i: [i]),
            st.sampled_from("é한\U0001f600").map(lambda c: [3 + byte for byte in c.encode()]),
        ),
        max_size=15,
    ),
    step_sizes=sizes,
)
def test_sentence_pieces_with_byte_fallback(parts: list[list[int]], step_sizes: list[int]) -> None:
    check(SENTENCE_PIECE, [token_id for part in parts for token_id in part], step_sizes)
