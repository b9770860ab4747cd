"""Edits of logits: each processor alone, their order, and what a request's own callables may do."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.backends.base import Float32Array
from octavo.graphs.errors import RequestError
from octavo.runtime.sampling.logits_processors import (
    LogitsProcessor,
    LogitsRow,
    apply_processors,
    make_processors,
)
from octavo.runtime.sampling.sampling_params import SamplingParams

VOCAB = 8
LOGITS = np.array([1.0, -1.0, 2.0, -2.0, 0.0, 0.5, -0.5, 3.0], np.float32)
EOS = 7

# A tokenizer of words: those after a space are other tokens than those at the beginning.
WORDS = {"bad": [1], " bad": [2], "so": [3], " so": [4], "very bad": [5, 2], " very bad": [6, 2]}


def encode(text: str) -> list[int]:
    return WORDS[text]


def row_of(
    prompt: Sequence[int] = (), output: Sequence[int] = (), logits: Float32Array = LOGITS
) -> LogitsRow:
    return LogitsRow(logits, np.array(prompt, np.int32), np.array(output, np.int32))


def processors_of(
    *, eos: Sequence[int] = (EOS,), vocab_size: int = VOCAB, **values: Any
) -> tuple[LogitsProcessor, ...]:
    params = SamplingParams(**values)
    return make_processors(params, eos_token_ids=eos, vocab_size=vocab_size, encode=encode)


def edited(
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    *,
    logits: Float32Array = LOGITS,
    **values: Any,
) -> Float32Array:
    row = row_of(prompt, output, logits)
    apply_processors(processors_of(**values), row)
    return row.values


def banned(*args: Any, **values: Any) -> list[int]:
    return np.flatnonzero(np.isneginf(edited(*args, **values))).tolist()


def penalised(
    logits: Float32Array, prompt: Sequence[int], output: Sequence[int], params: SamplingParams
) -> NDArray[np.float64]:
    """[V] f64: the definition of the three penalties, token by token."""
    result = logits.astype(np.float64)
    counts = Counter(output)
    for token in {*prompt, *output} & set(range(len(logits))):
        factor = params.repetition_penalty
        result[token] *= 1 / factor if result[token] > 0 else factor
        result[token] -= params.frequency_penalty * counts[token]
        result[token] -= params.presence_penalty * (counts[token] > 0)
    return result


def test_no_edits_no_processors_and_the_row_itself() -> None:
    assert processors_of() == ()
    assert processors_of(stop="x", stop_token_ids=[1], ignore_eos=True, logprobs=3, top_k=4) == ()
    row = row_of()
    apply_processors(processors_of(min_tokens=1, eos=()), row)
    apply_processors(processors_of(bad_words=["very bad"]), row)
    apply_processors(processors_of(frequency_penalty=1.0), row)
    assert row.values is LOGITS


def test_an_edit_leaves_the_engines_logits_alone() -> None:
    before = LOGITS.copy()
    row = row_of([1], [2])
    apply_processors(processors_of(repetition_penalty=2.0, min_tokens=5, logit_bias={1: 1.0}), row)
    assert row.values is not LOGITS
    assert row.values.flags.c_contiguous
    assert row.values.dtype == np.float32
    np.testing.assert_array_equal(LOGITS, before)


def test_row_edits() -> None:
    row = row_of()
    row.add([0, 2, 0], [1.0, -1.0, 0.5])
    row.add(1, 4)
    assert row.logits[:4].tolist() == [2.5, 3.0, 1.0, -2.0]
    row.assign(np.array([3, 4]), 9.0)
    row.assign([5], [-math.inf])
    row.ban(())
    row.ban([6])
    assert row.logits.tolist() == [2.5, 3.0, 1.0, 9.0, 9.0, -math.inf, -math.inf, 3.0]
    row.keep_only([5, 0])
    assert row.logits.tolist() == [2.5] + [-math.inf] * 7
    assert row.values.tolist() == row.logits.tolist()


@pytest.mark.parametrize(
    ("token_ids", "values", "sentence"),
    [
        ([8], 0.0, "token id 8 of an edit lies outside the vocabulary of 8"),
        ([3, -1], 0.0, "token id -1 of an edit lies outside the vocabulary of 8"),
        ([0.5], 0.0, "token ids of type float64 edit a row: give integers"),
        ([True] * 8, 0.0, "token ids of type bool edit a row: give integers"),
        ([1], math.nan, "a value of an edit is nan or inf"),
        ([1], math.inf, "a value of an edit is nan or inf"),
        ([1], 1e300, "a value of an edit is nan or inf"),
    ],
)
def test_wrong_edits_are_refused(token_ids: Any, values: Any, sentence: str) -> None:
    row = row_of()
    with pytest.raises(RequestError, match=sentence):
        row.add(token_ids, values)
    with pytest.raises(RequestError, match=sentence):
        row.assign(token_ids, values)
    assert row.values.tolist() == LOGITS.tolist()


def test_the_views_of_a_row_are_read_only() -> None:
    row = row_of([1], [2])
    for view in (row.logits, row.prompt_token_ids, row.output_token_ids):
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 0


def test_allowed_token_ids() -> None:
    values = edited(allowed_token_ids=[6, 2])
    assert np.flatnonzero(np.isfinite(values)).tolist() == [2, 6]
    assert values[[2, 6]].tolist() == [2.0, -0.5]


def test_logit_bias() -> None:
    values = edited(logit_bias={1: 2.5, 7: -500})
    assert values.tolist() == [1.0, 1.5, 2.0, -2.0, 0.0, 0.5, -0.5, -97.0]


def test_bad_words_at_a_beginning_and_after_a_space() -> None:
    assert banned(bad_words=["bad"]) == [1, 2]
    assert banned([], [3], bad_words=[" bad", "so"]) == [1, 2, 3, 4]


def test_bad_words_ban_the_last_token_after_those_before_it() -> None:
    assert banned([5], [], bad_words=["very bad"]) == []  # the prompt is not the output
    assert banned([], [3, 5], bad_words=["very bad"]) == [2]
    assert banned([], [3, 6], bad_words=["very bad"]) == [2]
    assert banned([], [5, 3], bad_words=["very bad"]) == []


def test_bad_words_of_three_tokens_need_both_before_the_last() -> None:
    def tokens(text: str) -> list[int]:
        return [0, 1, 2] if text.startswith(" ") else [3, 1, 2]

    params = SamplingParams(bad_words=["x"])
    processors = make_processors(params, eos_token_ids=(), vocab_size=VOCAB, encode=tokens)
    for output, expected in [([1], 2.0), ([4, 1], 2.0), ([0, 1], -math.inf), ([3, 1], -math.inf)]:
        row = row_of([3], output)
        apply_processors(processors, row)
        assert row.values[2] == expected


def test_bad_words_whose_tokens_cannot_come_are_dropped() -> None:
    params = SamplingParams(bad_words=["bad", "so"])
    processors = make_processors(params, eos_token_ids=(), vocab_size=3, encode=encode)
    row = row_of(logits=LOGITS[:3])
    apply_processors(processors, row)
    assert row.values.tolist() == [1.0, -math.inf, -math.inf]


def test_bad_words_need_tokens() -> None:
    params = SamplingParams(bad_words=[" "])
    with pytest.raises(RequestError, match="the bad word ' ' has no tokens"):
        make_processors(params, eos_token_ids=(), vocab_size=VOCAB, encode=lambda _: [])
    with pytest.raises(RequestError, match="bad_words needs a tokenizer"):
        make_processors(params, eos_token_ids=(), vocab_size=VOCAB, encode=None)


def test_d16_min_tokens_does_not_count_the_prompt() -> None:
    """D16: a prompt of ten tokens and an output of two are two tokens."""
    for output, expected in [([], [3, EOS]), ([0, 1], [3, EOS]), ([0, 1, 2], [])]:
        assert banned([1] * 10, output, min_tokens=3, stop_token_ids=[3]) == expected


@pytest.mark.parametrize("eos", [(-1,), (8,), (-1, 8, 10**9), ()])
def test_d16_an_eos_id_outside_the_vocabulary_bans_no_other_token(eos: tuple[int, ...]) -> None:
    """D16: -1 would be the last token of the vocabulary."""
    assert banned(min_tokens=3, eos=eos) == []
    assert banned(min_tokens=3, eos=(*eos, 2)) == [2]


def test_d14_min_tokens_bans_every_eos_also_where_they_are_ignored() -> None:
    """D14: a list of EOS ids, all of them; ignore_eos ends nothing and min_tokens still bans."""
    assert banned(min_tokens=1, eos=(2, 5, 7)) == [2, 5, 7]
    assert banned(min_tokens=1, eos=(2, 5, 7), ignore_eos=True) == [2, 5, 7]
    assert banned([], [0], min_tokens=1, eos=(2, 5, 7), ignore_eos=True) == []
    assert banned(eos=(2, 5, 7), ignore_eos=True) == []


def test_repetition_penalty_takes_prompt_and_output_once_each() -> None:
    values = edited([0, 0, 1, 6], [1, 7, 7], repetition_penalty=2.0)
    assert values.tolist() == [0.5, -2.0, 2.0, -2.0, 0.0, 0.5, -1.0, 1.5]


def test_frequency_and_presence_penalties_take_the_output_only() -> None:
    values = edited([0, 0, 1], [1, 7, 7], frequency_penalty=0.5)
    assert values.tolist() == [1.0, -1.5, 2.0, -2.0, 0.0, 0.5, -0.5, 2.0]
    values = edited([0, 0, 1], [1, 7, 7], presence_penalty=-0.5)
    assert values.tolist() == [1.0, -0.5, 2.0, -2.0, 0.0, 0.5, -0.5, 3.5]


def test_a_prompt_with_padding_ids_of_the_vocabulary() -> None:
    """They are legal tokens of a prompt that have no logit to be sampled."""
    values = edited([0, 8, 1000], [], repetition_penalty=2.0)
    assert values.tolist() == [0.5, *LOGITS[1:].tolist()]


def test_penalties_keep_banned_tokens_banned_and_meet_no_nan() -> None:
    values = edited([0, 4], [4, 0], allowed_token_ids=[2], repetition_penalty=1e-300)
    assert np.flatnonzero(values > -math.inf).tolist() == [2]
    values = edited([0, 1, 4], [], repetition_penalty=1e300)
    assert values[[0, 1, 4]].tolist() == [pytest.approx(0.0), -np.finfo(np.float32).max, 0.0]


@pytest.mark.parametrize(
    "values",
    [
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.7, "presence_penalty": -1.5},
        {"frequency_penalty": 0.3, "presence_penalty": 0.9},
        {"repetition_penalty": 1.1, "frequency_penalty": -0.2, "presence_penalty": 2.0},
    ],
)
def test_penalties_against_their_definition(values: dict[str, float]) -> None:
    rng = np.random.default_rng(7)
    params = SamplingParams(**values)  # type: ignore[arg-type]
    processors = make_processors(params, eos_token_ids=(), vocab_size=500, encode=None)
    history = rng.integers(0, 500, 300).tolist()
    for length in range(100, 300, 7):
        logits = rng.normal(0, 5, 500).astype(np.float32)
        row = row_of(history[:100], history[100:length], logits)
        apply_processors(processors, row)
        expected = penalised(logits, history[:100], history[100:length], params)
        np.testing.assert_allclose(row.values, expected, rtol=1e-6, atol=1e-5)


def test_s04_s07_every_row_of_a_verification_has_its_own_history() -> None:
    """S04, S07: penalties count each accepted draft, and every edit reaches every row.

    One token and the drafts 5, 5, 3: the rows must be what one token at a time gives.
    """
    values: dict[str, Any] = {
        "repetition_penalty": 1.5,
        "frequency_penalty": 0.25,
        "presence_penalty": 0.5,
        "logit_bias": {0: 1.0},
        "min_tokens": 3,
        "bad_words": ["very bad"],
    }
    prompt, output = [0, 1], [5, 5, 3]
    processors = processors_of(**values)
    rows = [row_of(prompt, output[:count]) for count in range(4)]
    for row in rows:
        apply_processors(processors, row)
    # 5 stands in the output not at all, once, twice, twice; its logit is 0.5.
    penalty = 0.5 / 1.5 - 0.5
    assert [float(row.values[5]) for row in rows] == pytest.approx(
        [0.5, penalty - 0.25, penalty - 0.5, penalty - 0.5]
    )
    assert [float(row.values[3]) for row in rows] == [-2.0, -2.0, -2.0, -3.75]
    # The bias is added before the repetition penalty divides: (1 + 1) / 1.5.
    assert [float(row.values[0]) for row in rows] == pytest.approx([2 / 1.5] * 4)
    assert [bool(np.isneginf(row.values[EOS])) for row in rows] == [True, True, True, False]
    assert [bool(np.isneginf(row.values[2])) for row in rows] == [False, True, True, False]
    for count, row in enumerate(rows):
        np.testing.assert_array_equal(row.values, edited(prompt, output[:count], **values))


def test_rejected_drafts_and_steps_tried_again_leave_no_trace() -> None:
    processors = processors_of(frequency_penalty=1.0, repetition_penalty=1.2)
    for output in ([1, 2], [1, 2, 3], [1, 2, 3, 3], [1, 2, 4], [1, 2, 4], [1, 2], [], [2, 1]):
        row = row_of([6], output)
        apply_processors(processors, row)
        fresh = edited([6], output, frequency_penalty=1.0, repetition_penalty=1.2)
        np.testing.assert_array_equal(row.values, fresh)


def test_the_order_is_vllms() -> None:
    """Callables see what came before them and nothing of the penalties."""
    seen: list[list[float]] = []

    def double(row: LogitsRow) -> None:
        seen.append(row.logits.tolist())
        row.add([2], [2.0])

    values = edited(
        [],
        [2],
        allowed_token_ids=[0, 1, 2, EOS],
        bad_words=["bad"],
        min_tokens=2,
        logit_bias={0: 1.0, 1: 50.0},
        logits_processors=[double, double],
        presence_penalty=0.5,
        repetition_penalty=2.0,
    )
    banned_row = [-math.inf] * VOCAB
    assert seen == [[2.0, *banned_row[1:]]] * 2
    assert values.tolist() == [2.0, *banned_row[1:]]

    seen.clear()
    values = edited([], [2], logits_processors=[double, double], repetition_penalty=2.0)
    assert [row[2] for row in seen] == [2.0, 4.0]
    assert values[2] == 3.0


def test_a_callable_that_fails_is_named_with_its_cause() -> None:
    def wrong(row: LogitsRow) -> None:
        row.ban([VOCAB])

    def in_place(row: LogitsRow) -> None:
        row.logits[0] = 1.0

    class Divides:
        def __call__(self, row: LogitsRow) -> None:
            _ = 1 // len(row.output_token_ids)

    for processor, sentence in [
        (wrong, r"wrong failed \(RequestError: token id 8 of an edit lies outside"),
        (in_place, r"in_place failed \(ValueError: .* read-only\)"),
        (Divides(), r"Divides failed \(ZeroDivisionError: .*\)"),
    ]:
        with pytest.raises(RequestError, match="the logits processor .*" + sentence) as caught:
            edited(logits_processors=[processor])
        assert caught.value.__cause__ is not None


def test_a_callable_that_returns_logits_has_misunderstood() -> None:
    def old_style(row: LogitsRow) -> Float32Array:
        return row.logits * 2

    with pytest.raises(RequestError, match="old_style returned a value of type ndarray"):
        edited(logits_processors=[old_style])


def test_interrupts_pass_through_a_callable() -> None:
    def interrupted(row: LogitsRow) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        edited(logits_processors=[interrupted])


def test_a_callable_may_ban_everything() -> None:
    """The sampler finds no token then, and the engine ends this request alone."""

    def silence(row: LogitsRow) -> None:
        row.ban(np.arange(len(row.logits)))

    assert np.isneginf(edited(logits_processors=[silence])).all()


def test_the_engines_own_nan_is_not_blamed_on_the_request() -> None:
    logits = LOGITS.copy()
    logits[3] = math.nan
    values = edited([3], [3], logits=logits, repetition_penalty=1.5, presence_penalty=1.0)
    assert math.isnan(values[3])
