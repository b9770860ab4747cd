"""Any history in any order of steps: a row's edits depend on that row alone."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.runtime.sampling.logits_processors import apply_processors, make_processors
from octavo.runtime.sampling.penalties import TokenCounts
from octavo.runtime.sampling.sampling_params import SamplingParams
from tests.unit.test_runtime_logits_processors import penalised, row_of

VOCAB = 12  # few, so that tokens repeat
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=20)
PENALTY = st.sampled_from([-2.0, -0.3, 0.0, 0.0, 0.7, 2.0])
PARAMS = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.0, 1.3, 4.0]),
    frequency_penalty=PENALTY,
    presence_penalty=PENALTY,
    min_tokens=st.integers(0, 10),
    logit_bias=st.none() | st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-9, 9), max_size=3),
    stop_token_ids=st.lists(st.integers(0, VOCAB - 1), max_size=2),
    bad_words=st.lists(st.text("abcd", min_size=1, max_size=3), max_size=3),
)


def encode(text: str) -> list[int]:
    return [" abcd".index(character) for character in text]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    params=PARAMS,
    prompt=TOKENS,
    output=TOKENS,
    steps=st.lists(
        st.tuples(
            st.lists(st.integers(0, VOCAB - 1), max_size=4),  # drafts
            st.integers(0, 5),  # tokens accepted of drafts and what follows
            st.booleans(),  # the step fails once and is tried again
        ),
        max_size=8,
    ),
    seed=st.integers(0, 1000),
)
def test_rows_with_drafts_equal_rows_one_at_a_time(
    params: SamplingParams,
    prompt: list[int],
    output: list[int],
    steps: list[tuple[list[int], int, bool]],
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)

    def check(history: list[int]) -> None:
        logits = rng.normal(0, 4, VOCAB).astype(np.float32)
        alone = row_of(prompt, history, logits)
        make = make_processors(params, eos_token_ids=(3,), vocab_size=VOCAB, encode=encode)
        apply_processors(make, alone)
        row = row_of(prompt, history, logits)
        apply_processors(processors, row)
        np.testing.assert_array_equal(row.values, alone.values)

    processors = make_processors(params, eos_token_ids=(3,), vocab_size=VOCAB, encode=encode)
    for drafts, num_accepted, fails in steps:
        for _ in range(1 + fails):
            for count in range(len(drafts) + 1):
                check(output + drafts[:count])
        accepted = min(num_accepted, len(drafts))
        output = [*output, *drafts[:accepted], int(rng.integers(VOCAB))]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(params=PARAMS, prompt=TOKENS, output=TOKENS, seed=st.integers(0, 1000))
def test_edits_equal_their_definitions(
    params: SamplingParams, prompt: list[int], output: list[int], seed: int
) -> None:
    """Written down once more: bans, then the bias, then the penalties."""
    logits = np.random.default_rng(seed).normal(0, 4, VOCAB).astype(np.float32)
    expected = logits.copy()
    for word in params.bad_words:
        for sequence in (encode(word), encode(" " + word)):
            history = [-1, *output]  # something that no sequence begins with
            if history[len(history) - len(sequence) + 1 :] == sequence[:-1]:
                expected[sequence[-1]] = -np.inf
    if len(output) < params.min_tokens:
        expected[[3, *params.stop_token_ids]] = -np.inf
    for token, value in params.logit_bias_items:
        expected[token] += np.float32(value)

    processors = make_processors(params, eos_token_ids=(3,), vocab_size=VOCAB, encode=encode)
    row = row_of(prompt, output, logits)
    apply_processors(processors, row)
    np.testing.assert_allclose(
        row.values, penalised(expected, prompt, output, params), rtol=1e-5, atol=1e-5
    )


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    edits=st.lists(
        st.tuples(st.integers(0, 40), st.lists(st.integers(0, 5) | st.integers(0, 9999))),
        max_size=12,
    )
)
def test_counts_follow_any_history(edits: list[tuple[int, list[int]]]) -> None:
    counts = TokenCounts()
    history: list[int] = []
    for num_kept, tokens in edits:
        history = history[:num_kept] + tokens
        counts.follow(np.array(history, np.int32))
        ids, expected = np.unique(np.array(history, np.intp), return_counts=True)
        order = np.argsort(counts.token_ids)
        np.testing.assert_array_equal(counts.token_ids[order], ids)
        np.testing.assert_array_equal(counts.counts[order], expected)
