"""Text of the real tokenizer: streamed, stopped and decoded as `tokenizers` decodes it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.compiler.checkpoints import Checkpoint
from octavo.runtime.text.output_text import OutputText
from octavo.runtime.text.tokenizer import Tokenizer
from tests.property.made_texts import made_texts, streamed
from tests.unit.tokenizer_kinds import SCRIPTS


@pytest.fixture(scope="module")
def tokenizer(smollm2_checkpoint: Checkpoint) -> Tokenizer:
    loaded = smollm2_checkpoint.tokenizer
    assert loaded is not None
    # Characters in parts are what the tests are about.
    assert len(loaded.backend_tokenizer.encode("한").ids) == 2
    return Tokenizer(
        loaded.backend_tokenizer,
        bos_token_id=1,
        eos_token_id=2,
        chat_template=str(loaded.chat_template),
    )


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_survive_any_step(tokenizer: Tokenizer, script: str) -> None:
    """D01 emoji, D03 Korean, D08 several tokens at a time."""
    text = SCRIPTS[script]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    for step in (1, 2, 3, 8):
        assert streamed(tokenizer, ids, [step] * len(ids)) == text


@settings(max_examples=200, deadline=None, derandomize=True)
@given(text=made_texts, cut=st.integers(0, 3), step_sizes=st.lists(st.integers(0, 9), max_size=60))
def test_made_texts(tokenizer: Tokenizer, text: str, cut: int, step_sizes: list[int]) -> None:
    ids = tokenizer.encode(text)
    ids = ids[: len(ids) - cut]  # not always the text again: this vocabulary lacks some bytes
    assert streamed(tokenizer, ids, step_sizes) == tokenizer._backend.decode(ids)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    # Of the first 300 ids most are special tokens and single bytes.
    ids=st.lists(st.one_of(st.integers(0, 300), st.integers(0, 49_160)), max_size=40),
    skip_special_tokens=st.booleans(),
    step_sizes=st.lists(st.integers(0, 9), max_size=60),
)
def test_any_tokens(
    tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool, step_sizes: list[int]
) -> None:
    expected = tokenizer._backend.decode(ids, skip_special_tokens=skip_special_tokens)
    got = streamed(tokenizer, ids, step_sizes, skip_special_tokens=skip_special_tokens)
    assert got == expected


def test_the_text_of_every_token(tokenizer: Tokenizer) -> None:
    for token_id in range(tokenizer.vocab_size + 8):
        expected = tokenizer._backend.decode([token_id], skip_special_tokens=False)
        assert tokenizer.token_text(token_id) == expected


def test_a_stop_string_over_several_tokens(tokenizer: Tokenizer) -> None:
    text = "One \U0001f600 emoji.\n\nQ: 한국어"
    output = OutputText(tokenizer.detokenizer(), stop=["\n\nQ:"])
    shown = ""
    for token_id in tokenizer.encode(text):
        stopped_by = output.push(token_id)
        shown += output.text_since(len(shown))
        assert "One \U0001f600 emoji.".startswith(shown)
        if stopped_by is not None:
            break
    assert (stopped_by, shown) == ("\n\nQ:", "One \U0001f600 emoji.")


def test_d17_a_chat_begins_with_the_tokens_of_its_template(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert [tokenizer.token_text(token_id) for token_id in ids[:2]] == ["<|im_start|>", "system"]
    assert tokenizer.decode(ids, skip_special_tokens=False) == prompt
    assert ids.count(1) == 3  # system, user and the answer
