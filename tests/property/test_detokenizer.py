"""Any tokens, cut into pushes anywhere: the pieces concatenate to the full text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.runtime.text.detokenizer_pieces import LONGEST_HELD_RUN
from octavo.runtime.text.tokenizer import Tokenizer
from tests.property.made_texts import made_texts, streamed
from tests.unit import tokenizer_kinds as kinds

# Kinds that encode any text.
TEXT_KINDS = {
    "byte-level": kinds.byte_level(),
    "trained byte-level": kinds.trained_byte_level(),
    "llama": kinds.sentence_piece(),
    "gemma": kinds.sentence_piece("gemma"),
}
KINDS = TEXT_KINDS | {
    "metaspace": kinds.metaspace(),
    "word piece": kinds.word_piece(),
    "plain words": kinds.plain_words(),
    "word suffixes": kinds.word_suffixes(),
}
TOKENIZERS = {name: Tokenizer(backend) for name, backend in KINDS.items()}

sizes = st.lists(st.integers(0, 9), max_size=60)
exhaustive = settings(max_examples=200, deadline=None, derandomize=True)


@pytest.mark.parametrize("kind", TEXT_KINDS)
@exhaustive
@given(text=made_texts, step_sizes=sizes)
def test_any_text(kind: str, text: str, step_sizes: list[int]) -> None:
    ids = TOKENIZERS[kind].encode(text)
    decoded = TOKENIZERS[kind].decode(ids)
    assert streamed(TOKENIZERS[kind], ids, step_sizes) == decoded == KINDS[kind].decode(ids)
    if kind == "byte-level":  # the others have tokens whose text is not what they encode
        assert decoded == text


@pytest.mark.parametrize("kind", TEXT_KINDS)
@exhaustive
@given(text=made_texts, cut=st.integers(0, 9), step_sizes=sizes)
def test_any_text_cut_off(kind: str, text: str, cut: int, step_sizes: list[int]) -> None:
    """D10 and its like: the end may be within a character, or a run of bytes."""
    ids = TOKENIZERS[kind].encode(text)
    ids = ids[: len(ids) - cut]
    decoded = TOKENIZERS[kind].decode(ids)
    assert streamed(TOKENIZERS[kind], ids, step_sizes) == decoded


@pytest.mark.parametrize("kind", KINDS)
@exhaustive
@given(data=st.data(), skip_special_tokens=st.booleans(), step_sizes=sizes)
def test_any_tokens(
    kind: str, data: st.DataObject, skip_special_tokens: bool, step_sizes: list[int]
) -> None:
    """Special tokens, invalid bytes and unknown ids among them; equal to `tokenizers` itself."""
    backend = KINDS[kind]
    vocab_size = backend.get_vocab_size()
    # No longer than the runs of bytes that are held back as a whole.
    ids = data.draw(st.lists(st.integers(0, vocab_size + 3), max_size=LONGEST_HELD_RUN))
    expected = backend.decode(ids, skip_special_tokens=skip_special_tokens)
    got = streamed(TOKENIZERS[kind], ids, step_sizes, skip_special_tokens=skip_special_tokens)
    assert got == expected
    assert TOKENIZERS[kind].decode(ids, skip_special_tokens=skip_special_tokens) == expected


@exhaustive
@given(
    parts=st.lists(
        st.one_of(
            st.integers(0, kinds.FIRST_BYTE + 300).map(lambda token_id: [token_id]),
            st.sampled_from("é한\U0001f600").map(
                lambda char: [kinds.FIRST_BYTE + byte for byte in char.encode()] * 5
            ),
        ),
        max_size=30,
    ),
    step_sizes=sizes,
)
def test_long_runs_of_bytes(parts: list[list[int]], step_sizes: list[int]) -> None:
    """Longer than may be held back, valid and not, with a cut anywhere."""
    ids = [token_id for part in parts for token_id in part]
    tokenizer = TOKENIZERS["llama"]
    decoded = tokenizer.decode(ids)
    assert streamed(tokenizer, ids, step_sizes) == decoded
    # `tokenizers` makes a whole run U+FFFD, we at least all from the invalid byte on.
    reference = KINDS["llama"].decode(ids)
    if "\ufffd" not in reference:
        assert decoded == reference
    else:
        assert len(decoded) <= len(reference)
