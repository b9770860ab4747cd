"""What of a completion's text may be shown, and where stop strings end it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from octavo.graphs.errors import RequestError
from octavo.runtime.text.output_text import OutputText
from octavo.runtime.text.stop_strings import ROOT, StopStrings
from octavo.runtime.text.tokenizer import Tokenizer
from tests.unit.tokenizer_kinds import FIRST_BYTE, byte_level, id_of, sentence_piece

BYTES = Tokenizer(byte_level())  # one token a byte


def shown(
    text: str, stop: Sequence[str], *, include: bool = False, min_tokens: int = 0
) -> tuple[list[str], str | None]:
    """The text after each token, until it stops."""
    output = OutputText(
        BYTES.detokenizer(), stop=stop, include_stop_str_in_output=include, min_tokens=min_tokens
    )
    texts = []
    for token_id in BYTES.encode(text):
        stopped_by = output.push(token_id)
        texts.append(output.text)
        if stopped_by is not None:
            return texts, stopped_by
    output.finish()
    return [*texts, output.text], None


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    assert shown("aSTaSTO", ["STOP"]) == (
        ["a", "a", "a", "aSTa", "aSTa", "aSTa", "aSTa", "aSTaSTO"],
        None,
    )
    assert shown("xSTOP", ["STOP"]) == (["x"] * 5, "STOP")
    # A longer beginning that fails leaves the shorter one within it.
    assert shown("aabaac", ["aabaad", "acx"])[0] == ["", "", "", "", "", "aaba", "aabaac"]


def test_d13_text_after_the_stop_string_never_appears() -> None:
    backend = sentence_piece()
    tokenizer = Tokenizer(backend)
    backend.add_tokens(["yes.END no"])
    output = OutputText(tokenizer.detokenizer(), stop=["END"])
    one_token = id_of(backend, "yes.END no")
    assert output.push(one_token) == "END"
    assert output.text == "yes."
    # Neither by tokens that come too late, as those of a speculative step, nor at the end.
    assert output.push(one_token) == "END"
    output.finish()
    assert output.text == output.text_since(0) == "yes."


def test_a_stop_string_may_be_part_of_the_output() -> None:
    assert shown("aENDb", ["END"], include=True) == (["a", "aE", "aEN", "aEND"], "END")


def test_the_stop_string_complete_first_wins() -> None:
    # "b" ends before "abc" does; "ab" and "b" end together and the order given decides, as in vLLM.
    assert shown("xabc", ["abc", "b"]) == (["x", "x", "xa"], "b")
    assert shown("xab", ["b", "ab"]) == (["x", "x", "xa"], "b")
    assert shown("xab", ["ab", "b"]) == (["x", "x", "x"], "ab")
    assert shown("xabb", ["b", "bb"]) == (["x", "xa", "xa"], "b")


def test_stop_strings_within_the_first_min_tokens_do_not_count() -> None:
    assert shown("a.b.c", ["."]) == (["a", "a"], ".")
    assert shown("a.b.c", ["."], min_tokens=2) == (["a", "a.", "a.b", "a.b"], ".")
    assert shown("a.b.c", ["."], min_tokens=4)[1] is None
    # One that begins in them and is complete after them does.
    assert shown("aEND", ["END"], min_tokens=3) == (["a"] * 4, "END")
    assert shown("aENDND", ["END"], min_tokens=4)[1] is None
    # What the first tokens left of a character belongs to the token that completes it.
    assert shown("é", ["é"], min_tokens=1)[1] == "é"
    assert shown("é", ["é"], min_tokens=2)[1] is None


def test_d01_a_character_is_shown_once_it_is_complete() -> None:
    emoji = "\U0001f600"
    assert shown("a" + emoji, []) == (["a"] * 4 + ["a" + emoji] * 2, None)
    assert shown(emoji * 2, [emoji + "\U0001f601"])[0] == [""] * 7 + [emoji] + [emoji * 2]


def test_d10_a_length_cut_within_a_character_ends_the_text() -> None:
    for stop in ([], ["END"]):
        output = OutputText(BYTES.detokenizer(), stop=stop)
        for token_id in BYTES.encode("aE\U0001f600")[:-1]:
            assert output.push(token_id) is None
        assert output.text == ("a" if stop else "aE")
        output.finish()
        assert output.text == "aE\ufffd"


def test_a_line_end_as_a_byte_token_stops_at_once() -> None:
    """Llama 2 writes it as the byte 0x0A, which waits for the next token to be shown."""
    backend = sentence_piece()
    a, line_end = id_of(backend, "▁a"), FIRST_BYTE + 0x0A
    output = OutputText(Tokenizer(backend).detokenizer(), stop=["a\n", "\n\n"])
    assert output.push(a) is None
    assert output.push(line_end) == "a\n"
    assert output.text == ""
    output = OutputText(
        Tokenizer(backend).detokenizer(), stop=["\n\n"], include_stop_str_in_output=True
    )
    assert [output.push(token_id) for token_id in (a, line_end, line_end)] == [None, None, "\n\n"]
    assert output.text == "a\n\n"


def test_the_text_since_a_character() -> None:
    output = OutputText(BYTES.detokenizer(), stop=["END"])
    for token_id in BYTES.encode("one two E"):
        output.push(token_id)
    assert output.num_chars == 8
    for read_all in (False, True):
        if read_all:
            assert output.text == "one two "
        for start in range(11):
            assert output.text_since(start) == "one two "[start:]


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError, match="stop holds an empty string"):
        OutputText(BYTES.detokenizer(), stop=["a", ""])


def test_a_match_does_not_depend_on_the_pieces_of_the_text() -> None:
    stops = StopStrings(["abab", "bc"])
    state = ROOT
    held = []
    for piece in ("xab", "a", "ab"):  # "abaab": no match, and "ab" may go on
        state, match = stops.scan(state, piece)
        assert match is None
        held.append(stops.num_held(state))
    assert held == [2, 3, 2]
    _, match = stops.scan(state, "abc")
    assert match is not None
    assert (match.stop, match.end) == ("abab", 2)
    # Behind it another one ends.
    _, match = stops.scan(state, "abc", after=2)
    assert match is not None
    assert (match.stop, match.end) == ("bc", 3)
