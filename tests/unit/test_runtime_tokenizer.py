"""Encoding, and text that arrives token by token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, processors

from octavo.backends import null
from octavo.backends.bundle import read_manifest
from octavo.backends.manifest import Limits
from octavo.graphs.errors import BundleError, RequestError
from octavo.runtime.text.detokenizer_bytes import ByteLevelDecoder
from octavo.runtime.text.detokenizer_pieces import LONGEST_HELD_RUN, PieceDecoder
from octavo.runtime.text.detokenizer_window import WindowDecoder
from octavo.runtime.text.tokenizer import Tokenizer
from tests.unit.tokenizer_kinds import (
    BYTE_BOS,
    BYTE_EOS,
    FIRST_BYTE,
    LLAMA_BOS,
    LLAMA_EOS,
    SCRIPTS,
    byte_level,
    id_of,
    metaspace,
    plain_words,
    sentence_piece,
    trained_byte_level,
    word_piece,
    word_suffixes,
)


def with_bos(backend: tokenizers.Tokenizer, bos_token_id: int = BYTE_BOS) -> tokenizers.Tokenizer:
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos_token_id)]
    )
    return backend


def pieces(
    tokenizer: Tokenizer, ids: list[int], step: int = 1, *, skip_special_tokens: bool = True
) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip_special_tokens)
    out = [detokenizer.push(ids[start : start + step]) for start in range(0, len(ids), step)]
    return [*out, detokenizer.flush()]


def byte_ids(data: bytes) -> list[int]:
    """The tokens of a SentencePiece tokenizer for single bytes."""
    return [FIRST_BYTE + byte for byte in data]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("step", [1, 2, 3, 8])
def test_d01_d03_d08_pieces_concatenate_to_the_full_text(script: str, step: int) -> None:
    """D01 emoji, D03 Korean, D08 several tokens at a time."""
    text = SCRIPTS[script]
    for backend in (byte_level(), trained_byte_level(), sentence_piece(), sentence_piece("gemma")):
        tokenizer = Tokenizer(backend)
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == backend.decode(ids) == text
        assert "".join(pieces(tokenizer, ids, step)) == text


def test_d01_d04_an_incomplete_character_is_held_back() -> None:
    tokenizer = Tokenizer(byte_level())
    ids = tokenizer.encode("a\U0001f600b")
    assert pieces(tokenizer, ids) == ["a", "", "", "", "\U0001f600", "b", ""]


def test_d04_four_tokens_are_one_emoji() -> None:
    backend = tokenizers.Tokenizer(
        models.WordLevel({"ð": 3574, "Ł": 252, "ĺ": 242, "Ģ": 1, "a": 0}, unk_token="a")
    )
    backend.decoder = decoders.ByteLevel()
    ids = [3574, 252, 242, 1]  # the bytes F0 9F 98 80
    assert backend.decode(ids) == "\U0001f600"
    assert pieces(Tokenizer(backend), ids) == ["", "", "", "\U0001f600", ""]


def test_d10_a_cut_in_the_middle_of_a_character_ends_as_the_full_decode_does() -> None:
    tokenizer = Tokenizer(byte_level())
    for cut in (1, 2, 3):
        ids = tokenizer.encode("a\U0001f600")[: 1 + cut]
        assert pieces(tokenizer, ids)[:-1] == ["a"] + [""] * cut
        assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids) == "a\ufffd"


def test_d09_invalid_bytes_are_held_for_a_bounded_time() -> None:
    tokenizer = Tokenizer(byte_level())
    first_half = tokenizer.encode("\xff")[0]  # of a two-byte character: never valid alone
    ids = [first_half] * 100
    assert pieces(tokenizer, ids) == ["", *["\ufffd"] * 99, "\ufffd"]
    # Three bytes of a character of four are one replacement character once nothing completes them.
    ids = [*tokenizer.encode("\U0001f600")[:3], *tokenizer.encode("a")]
    assert pieces(tokenizer, ids) == ["", "", "", "\ufffda", ""]


def test_d05_d06_leading_spaces_survive() -> None:
    backend = sentence_piece()
    tokenizer = Tokenizer(backend, bos_token_id=LLAMA_BOS)
    for tokens, text in (
        (["▁a", "▁b", "▁", "▁b", "▁▁", "b"], "a b  b  b"),
        (["▁", "▁a", "▁▁", "▁b"], " a   b"),
        (["▁▁", "▁a"], "  a"),
    ):
        ids = [id_of(backend, token) for token in tokens]
        assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids) == text
        # D07, D18: special tokens are no text and change none.
        with_special = [LLAMA_BOS, *ids[:2], LLAMA_EOS, *ids[2:]]
        assert "".join(pieces(tokenizer, with_special)) == tokenizer.decode(with_special) == text


def test_d07_d18_spaces_beside_special_tokens_that_are_shown() -> None:
    """Only the text's own beginning loses its space, not the first piece after a special token."""
    backend = sentence_piece()
    tokenizer = Tokenizer(backend)
    a, b = id_of(backend, "▁a"), id_of(backend, "▁b")
    for ids, text in (
        ([LLAMA_BOS, a, LLAMA_EOS, b], "<s> a</s> b"),
        ([a, LLAMA_EOS, b], "a</s> b"),
    ):
        assert backend.decode(ids, skip_special_tokens=False) == text
        assert "".join(pieces(tokenizer, ids, skip_special_tokens=False)) == text


def test_a_run_of_byte_tokens_is_held_back_until_it_ends() -> None:
    backend = sentence_piece()
    tokenizer = Tokenizer(backend)
    a, b = id_of(backend, "▁a"), id_of(backend, "b")
    ids = [a, *byte_ids("\U0001f600".encode()), b]
    assert pieces(tokenizer, ids) == ["a", "", "", "", "", "\U0001f600b", ""]
    # One invalid byte makes the whole run invalid, and that is known at once.
    ids = [a, *byte_ids(b"xy\xffz"), b, *byte_ids(b"\n")]
    out = ["a", "", "", "\ufffd" * 3, "\ufffd", "b", "", "\n"]
    assert pieces(tokenizer, ids) == out
    assert backend.decode(ids) == "".join(out)
    # A special token that has no text does not end a run, one that is shown does.
    ids = [*byte_ids(b"\xc3"), LLAMA_EOS, *byte_ids(b"\xa9")]
    assert pieces(tokenizer, ids) == ["", "", "", "é"]
    shown = pieces(tokenizer, ids, skip_special_tokens=False)
    assert shown == ["", "\ufffd</s>", "\ufffd", ""]


def test_d09_no_more_than_a_bounded_part_of_a_run_is_held_back() -> None:
    backend = sentence_piece()
    tokenizer = Tokenizer(backend)
    text = "한" * LONGEST_HELD_RUN
    detokenizer = tokenizer.detokenizer()
    shown = ""
    for num_bytes, token_id in enumerate(byte_ids(text.encode()), 1):
        shown += detokenizer.push([token_id])
        assert num_bytes - len(shown.encode()) <= LONGEST_HELD_RUN
    assert shown + detokenizer.flush() == text == backend.decode(byte_ids(text.encode()))
    # Once shown, text stays: here `tokenizers` takes all of the run back, and streams cannot.
    ids = byte_ids(b"x" * LONGEST_HELD_RUN + b"yy\xffz")
    text = "x" * LONGEST_HELD_RUN + "\ufffd" * 4
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids) == text


def test_what_is_pending_is_text_that_may_be_undone() -> None:
    tokenizer = Tokenizer(sentence_piece())
    detokenizer = tokenizer.detokenizer()
    pending = []
    for token_id in byte_ids(b" \n\xc3\xa9\xff"):
        detokenizer.push([token_id])
        pending.append(detokenizer.pending())
    assert pending == ["", "\n", "", "\né", ""]  # the first space of a text is stripped


@pytest.mark.parametrize(
    ("make", "decoder"),
    [
        (byte_level, ByteLevelDecoder),
        (sentence_piece, PieceDecoder),
        (metaspace, PieceDecoder),
        (word_piece, PieceDecoder),
        (plain_words, PieceDecoder),
        (word_suffixes, WindowDecoder),
    ],
)
def test_each_kind_has_its_decoder(
    make: Callable[[], tokenizers.Tokenizer], decoder: type[object]
) -> None:
    assert type(Tokenizer(make())._decoder) is decoder


@pytest.mark.parametrize(
    "stages",
    [
        [decoders.Replace(tokenizers.Regex("▁+"), " "), decoders.ByteFallback(), decoders.Fuse()],
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 0, 1)],
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Strip(" ", 1, 0)],
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " ")],
    ],
)
def test_chains_that_do_more_are_left_to_the_window(stages: list[decoders.Decoder]) -> None:
    backend = sentence_piece()
    backend.decoder = decoders.Sequence(stages)
    assert type(Tokenizer(backend)._decoder) is WindowDecoder


def test_text_of_single_tokens() -> None:
    """As it is in the middle of a text; special tokens as they are written."""
    tokenizer = Tokenizer(byte_level())
    emoji = tokenizer.encode("\U0001f600")
    assert [tokenizer.token_text(i) for i in emoji] == ["\ufffd"] * 4
    assert tokenizer.token_text(tokenizer.encode(" ")[0]) == " "
    assert tokenizer.token_text(BYTE_EOS) == "</s>"
    assert tokenizer.token_text(5000) == ""
    backend = sentence_piece()
    tokenizer = Tokenizer(backend)
    assert tokenizer.token_text(id_of(backend, "▁a")) == " a"
    assert [tokenizer.token_text(i) for i in byte_ids(b"\n\xc3")] == ["\n", "\ufffd"]
    assert tokenizer.token_text(LLAMA_EOS) == "</s>"
    assert tokenizer.token_text(5000) == ""
    backend = word_suffixes()
    assert Tokenizer(backend).token_text(id_of(backend, "b</w>")) == "b"


def test_ids_the_tokenizer_does_not_know_have_no_text() -> None:
    tokenizer = Tokenizer(byte_level())
    ids = [*tokenizer.encode("ab"), 5000, *tokenizer.encode("c")]
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids) == "abc"


def test_d17_the_bos_token_is_not_doubled() -> None:
    tokenizer = Tokenizer(with_bos(byte_level()), bos_token_id=BYTE_BOS)
    once = tokenizer.encode("a")
    assert once[0] == BYTE_BOS
    assert tokenizer.encode("<s>a") == once
    assert tokenizer.encode("a", add_special_tokens=False) == once[1:]
    # Without a bos_token_id nothing may be guessed.
    assert Tokenizer(with_bos(byte_level())).encode("<s>a") == [BYTE_BOS, *once]


def test_d17_the_text_of_a_chat_template_has_the_bos_tokens_that_it_wrote() -> None:
    messages = [{"role": "user", "content": "a"}]
    for template, num_bos in (
        ("{{ bos_token }}{{ messages[0].content }}", 1),
        ("{{ messages[0].content }}", 0),
    ):
        backend = with_bos(sentence_piece(), LLAMA_BOS)
        tokenizer = Tokenizer(backend, bos_token_id=LLAMA_BOS, chat_template=template)
        prompt = tokenizer.apply_chat_template(messages)
        ids = tokenizer.encode(prompt, add_special_tokens=False)
        assert ids == [LLAMA_BOS] * num_bos + [id_of(backend, "▁"), id_of(backend, "a")]
        assert tokenizer.encode(prompt).count(LLAMA_BOS) == 1


def test_text_that_is_no_unicode_is_refused() -> None:
    tokenizer = Tokenizer(byte_level())
    with pytest.raises(RequestError, match=r"lone surrogate '\\ud83d' at position 1, which is no"):
        tokenizer.encode("a\ud83db")
    wrong: Any = 3
    with pytest.raises(RequestError, match="a prompt is of type int"):
        tokenizer.encode(wrong)


def test_decode_skips_special_tokens_unless_told_not_to() -> None:
    tokenizer = Tokenizer(byte_level())
    ids = tokenizer.encode("<s>a</s>")
    assert tokenizer.decode(ids) == "a"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>a</s>"


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    limits = Limits(max_model_len=8, max_num_seqs=1, max_num_batched_tokens=8, block_size=4)
    bundle = null.write_engine(
        tmp_path / "engine", vocab_size=8, limits=limits, extra_files={"tokenizer.json": b"{"}
    )
    with pytest.raises(BundleError, match=r"tokenizer.json cannot be read"):
        Tokenizer.from_bundle(bundle, read_manifest(bundle).spec)
