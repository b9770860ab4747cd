"""The index of n-grams against a search through the whole text."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.runtime.speculation.ngram import NgramIndex


def search(tokens: list[int], least: int, most: int) -> int:
    """Where the longest suffix that came before ended last, 0 for none."""
    for length in range(most, least - 1, -1):
        suffix = tokens[len(tokens) - length :]
        if length >= len(tokens):
            continue
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == suffix:
                return end
    return 0


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 2), max_size=40),
    pieces=st.lists(st.integers(1, 5), max_size=20),
    least=st.integers(1, 3),
    more=st.integers(0, 3),
)
def test_it_finds_what_a_search_finds(
    tokens: list[int], pieces: list[int], least: int, more: int
) -> None:
    index = NgramIndex(least, least + more)
    array = np.array(tokens, dtype=np.int32)
    end = 0
    for piece in [*pieces, len(tokens)]:
        end = min(len(tokens), end + piece)
        wanted = search(tokens[:end], least, least + more)
        assert index.find(array[:end]) == wanted
        assert index.find(array[:end]) == wanted  # asked again, it says the same


def test_its_size_grows_with_the_text_and_no_faster() -> None:
    """Periodic text, where a suffix has as many earlier places as the text is long."""
    index = NgramIndex(2, 5)
    index.find(np.array([1, 2, 3] * 10_000, dtype=np.int32))
    assert len(index._ends) == 4 * 3
    index = NgramIndex(2, 5)
    index.find(np.arange(10_000, dtype=np.int32))
    assert len(index._ends) == sum(10_000 - length + 1 for length in range(2, 6))
