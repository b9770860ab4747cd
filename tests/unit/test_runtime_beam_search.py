"""Beam search worked out by hand, against brute force, and its refusals."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.graphs.errors import RequestError
from octavo.runtime.sampling.beam_search import (
    BeamCandidates,
    BeamHypothesis,
    BeamSearch,
    BeamSearchParams,
    BeamStep,
    best_candidates,
)

EarlyStopping = bool | Literal["never"]
Prefix = tuple[int, ...]

# Four tokens: 0 ends a sequence, the others go on. Probabilities of the next token by prefix.
EOS, A, B, C = range(4)
MODEL: Mapping[Prefix, tuple[float, float, float, float]] = {
    (): (0.15, 0.5, 0.3, 0.05),
    (A,): (0.4, 0.3, 0.2, 0.1),
    (B,): (0.1, 0.2, 0.6, 0.1),
    (B, B): (0.5, 0.2, 0.19, 0.11),
    (A, A): (0.7, 0.1, 0.09, 0.11),
    (B, B, A): (0.9, 0.04, 0.03, 0.03),
    (B, B, B): (0.2, 0.3, 0.3, 0.2),
}


def candidates(probabilities: Sequence[float], count: int) -> BeamCandidates:
    return best_candidates(np.log(np.asarray(probabilities, np.float32)), count)


def advance(search: BeamSearch, model: Mapping[Prefix, Sequence[float]]) -> BeamStep:
    return search.advance(
        [candidates(model[tuple(b.token_ids)], search.num_candidates) for b in search.beams]
    )


def run(
    params: BeamSearchParams,
    model: Mapping[Prefix, Sequence[float]] = MODEL,
    eos_token_ids: Sequence[int] = (EOS,),
) -> BeamSearch:
    search = BeamSearch(params, eos_token_ids=eos_token_ids, max_output_tokens=params.max_tokens)
    while not search.done:
        search.apply(advance(search, model))
    return search


def sequences(hypotheses: Sequence[BeamHypothesis]) -> list[Prefix]:
    return [tuple(hypothesis.token_ids) for hypothesis in hypotheses]


def test_the_steps_of_a_search_of_width_2() -> None:
    """Candidates that end must be among the best two; those that run on need only be the best.

    step 1: a .5 and b .3 run; EOS .15 is third, so it is no hypothesis.
    step 2: a EOS .5 * .4 = .2 is the first, a hypothesis of score ln(.2) / 2 = -.805;
            b b .3 * .6 = .18 and a a .5 * .3 = .15 run: the order of the beams has changed.
    step 3: a a EOS .15 * .7 = .105, b b EOS .18 * .5 = .09, both hypotheses, of scores
            ln(.105) / 3 = -.7513 and ln(.09) / 3 = -.8026: a EOS is dropped.
            The best beam is b b a .18 * .2 = .036, of score ln(.036) / 3 = -1.108: the end.
    """
    search = BeamSearch(
        BeamSearchParams(beam_width=2, max_tokens=8), eos_token_ids=(EOS,), max_output_tokens=8
    )
    assert (search.num_beams_running, search.num_tokens, search.done) == (1, 0, False)

    step = advance(search, MODEL)
    assert [(b.parent, b.token_id) for b in step.beams] == [(0, A), (0, B)]
    assert [b.cumulative_logprob for b in step.beams] == pytest.approx(np.log([0.5, 0.3]))
    assert (step.finished, step.done, step.num_tokens) == ((), False, 1)
    search.apply(step)
    assert search.num_beams_running == 2

    step = advance(search, MODEL)
    assert [(b.parent, b.token_id) for b in step.beams] == [(1, B), (0, A)]
    assert [b.token_ids for b in step.beams] == [[B, B], [A, A]]
    assert [b.cumulative_logprob for b in step.beams] == pytest.approx(np.log([0.18, 0.15]))
    assert sequences(step.finished) == [(A, EOS)]
    assert step.finished[0].score == pytest.approx(math.log(0.2) / 2)
    assert not step.done
    search.apply(step)
    assert sequences(search.hypotheses()) == [(A, EOS)]

    step = advance(search, MODEL)
    assert (step.beams, step.done) == ((), True)
    search.apply(step)
    assert (search.num_beams_running, search.done) == (0, True)
    best, second = search.hypotheses()
    assert (best.token_ids, second.token_ids) == ([A, A, EOS], [B, B, EOS])
    assert best.cumulative_logprob == pytest.approx(math.log(0.105))
    assert best.score == pytest.approx(math.log(0.105) / 3)
    assert second.score == pytest.approx(math.log(0.09) / 3)
    assert {(h.finish_reason, h.stop_reason) for h in (best, second)} == {("stop", None)}


@pytest.mark.parametrize(
    ("length_penalty", "expected"),
    [
        # ln .2 = -1.609, ln .105 = -2.254, ln .09 = -2.408
        (0.0, [(A, EOS), (A, A, EOS)]),
        # times 2 and 3: -3.219, -6.761, -7.224
        (-1.0, [(A, EOS), (A, A, EOS)]),
        # by 4 and 9: -.402, -.250, -.268
        (2.0, [(A, A, EOS), (B, B, EOS)]),
    ],
)
def test_length_penalties_divide_by_the_number_of_generated_tokens(
    length_penalty: float, expected: list[Prefix]
) -> None:
    search = run(
        BeamSearchParams(
            beam_width=2, max_tokens=3, length_penalty=length_penalty, early_stopping=True
        )
    )
    assert sequences(search.hypotheses()) == expected


@pytest.mark.parametrize(
    ("early_stopping", "max_tokens", "num_tokens"),
    [
        (False, 8, 3),
        (True, 8, 3),
        # Of length 8 the best beam could score ln(.036) / 8 = -.416 > -.8026: step 4 comes. In it
        # b b a EOS .036 * .9 = .0324 scores ln(.0324) / 4 = -.857, worse than the two there are.
        # The best beam is b b b a .18 * .19 * .3 = .01026: ln(.01026) / 8 = -.572 keeps it open.
        ("never", 8, 4),
        # Of length 4 it could score ln(.036) / 4 = -.831 only.
        ("never", 4, 3),
    ],
)
def test_when_a_search_ends(
    early_stopping: EarlyStopping, max_tokens: int, num_tokens: int
) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=max_tokens, early_stopping=early_stopping)
    search = BeamSearch(params, eos_token_ids=(EOS,), max_output_tokens=max_tokens)
    for _ in range(num_tokens):
        assert not search.done
        search.apply(advance(search, MODEL))
    assert search.done is (num_tokens == 3)
    assert sequences(search.hypotheses()) == [(A, A, EOS), (B, B, EOS)]


def test_a_search_goes_on_while_its_worst_hypothesis_can_be_bettered() -> None:
    """Of the hypotheses EOS .5 and x EOS .05, x x .45 is no match for the best: x x EOS .405."""
    model = {(): (0.5, 0.5), (1,): (0.1, 0.9), (1, 1): (0.9, 0.1)}
    search = run(BeamSearchParams(beam_width=2, max_tokens=8, length_penalty=0.0), model)
    assert (sequences(search.hypotheses()), search.num_tokens) == ([(0,), (1, 1, 0)], 3)


def test_early_stopping_true_does_not_wait_for_better_ones() -> None:
    """EOS .3 and x EOS .21 fill a width of 2; x x .49 would score ln(.49) / 2, above both."""
    model = {(): (0.3, 0.7), (1,): (0.3, 0.7), (1, 1): (0.9, 0.1)}
    expected = {True: [(1, 0), (0,)], False: [(1, 1, 0), (1, 0)]}
    for early_stopping, hypotheses in expected.items():
        params = BeamSearchParams(beam_width=2, max_tokens=8, early_stopping=early_stopping)
        assert sequences(run(params, model).hypotheses()) == hypotheses


def test_only_the_best_candidates_may_end() -> None:
    """a a .25 runs, a EOS .2 is a hypothesis, b EOS .16 is third and lost, b a .14 runs."""
    model = {(): (0.1, 0.5, 0.4), (A,): (0.4, 0.5, 0.1), (B,): (0.4, 0.35, 0.25)}
    search = BeamSearch(
        BeamSearchParams(beam_width=2, max_tokens=8), eos_token_ids=(EOS,), max_output_tokens=8
    )
    search.apply(advance(search, model))
    step = advance(search, model)
    assert sequences(step.finished) == [(A, EOS)]
    assert [b.token_ids for b in step.beams] == [[A, A], [B, A]]


def test_a_beam_that_can_only_equal_the_worst_hypothesis_is_not_continued() -> None:
    """EOS .5 and x .5 of a width of 1: x scores what the hypothesis does."""
    for early_stopping in (False, "never"):
        search = run(
            BeamSearchParams(
                beam_width=1, max_tokens=8, length_penalty=0.0, early_stopping=early_stopping
            ),
            {(): (0.5, 0.5)},
        )
        assert (sequences(search.hypotheses()), search.num_tokens) == ([(EOS,)], 1)


def test_never_expects_no_gain_of_length_from_a_negative_penalty() -> None:
    """Scores are log-probability times length.

    step 1: EOS .3 is a hypothesis of score ln(.3) = -1.204; a .65 and b .05 run.
    step 2: a a .585 runs; a EOS .0325 is second: 2 ln(.0325) = -6.85. As long as it is a a has
            2 ln(.585) = -1.07, which is better (20 ln(.585) = -10.7 would not be).
    step 3: a a EOS .5265 scores 3 ln(.5265) = -1.92. a a a .02925 has 3 ln(.02925) = -10.6.
    """
    model = {
        (): (0.3, 0.65, 0.05),
        (A,): (0.05, 0.9, 0.05),
        (B,): (0.5, 0.25, 0.25),
        (A, A): (0.9, 0.05, 0.05),
        (A, B): (0.98, 0.01, 0.01),
    }
    params = BeamSearchParams(
        beam_width=2, max_tokens=20, length_penalty=-1.0, early_stopping="never"
    )
    search = run(params, model)
    assert (sequences(search.hypotheses()), search.num_tokens) == ([(EOS,), (A, A, EOS)], 3)


def test_the_last_token_ends_every_beam() -> None:
    """Of length 2, a EOS .2 and b b .18 are the best; b b is cut, and a a .15 is third."""
    search = run(BeamSearchParams(beam_width=2, max_tokens=2))
    stopped, cut = search.hypotheses()
    assert (stopped.token_ids, stopped.finish_reason) == ([A, EOS], "stop")
    assert (cut.token_ids, cut.finish_reason, cut.stop_reason) == ([B, B], "length", None)
    assert cut.score == pytest.approx(math.log(0.18) / 2)


def test_an_end_token_in_the_last_place_is_a_stop() -> None:
    search = run(BeamSearchParams(beam_width=1, max_tokens=1), {(): (0.6, 0.4)})
    assert search.hypotheses()[0].finish_reason == "stop"


def test_max_output_tokens_is_the_limit_that_counts() -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=100)
    search = BeamSearch(params, eos_token_ids=(EOS,), max_output_tokens=1)
    step = advance(search, MODEL)
    assert step.done
    assert sequences(step.finished) == [(A,), (B,)]
    with pytest.raises(ValueError, match="max_output_tokens is 0, it must be at least 1"):
        BeamSearch(params, eos_token_ids=(EOS,), max_output_tokens=0)


def test_stop_tokens_and_eos_tokens() -> None:
    """a .5 and b .3 both end; which of them a stop token did is told."""
    params = BeamSearchParams(beam_width=2, max_tokens=5, stop_token_ids=(B,))
    search = run(params, {(): MODEL[()]}, eos_token_ids=(A,))
    assert [(h.token_ids, h.finish_reason, h.stop_reason) for h in search.hypotheses()] == [
        ([A], "stop", None),
        ([B], "stop", B),
    ]
    # An EOS token that is a stop token too is an EOS token, as in a request that samples.
    both = run(params, {(): MODEL[()]}, eos_token_ids=(A, B))
    assert [h.stop_reason for h in both.hypotheses()] == [None, None]


def test_ignored_eos_tokens_run_on() -> None:
    params = BeamSearchParams(beam_width=1, max_tokens=3, ignore_eos=True)
    often = (0.7, 0.1, 0.1, 0.1)
    search = run(params, {(): often, (EOS,): often, (EOS, EOS): often})
    assert sequences(search.hypotheses()) == [(EOS, EOS, EOS)]
    assert search.hypotheses()[0].finish_reason == "length"


def test_n_returns_the_best_of_the_hypotheses_kept() -> None:
    search = run(BeamSearchParams(beam_width=2, max_tokens=8, n=1))
    assert sequences(search.hypotheses()) == [(A, A, EOS)]


def test_ties_go_to_the_better_beam_and_the_lower_token() -> None:
    """All prefixes of a length are equally likely: the first ones in order are kept."""
    uniform = (0.25, 0.25, 0.25, 0.25)
    model = {prefix: uniform for n in range(2) for prefix in itertools.product(range(4), repeat=n)}
    search = run(BeamSearchParams(beam_width=3, max_tokens=2), model, eos_token_ids=())
    assert sequences(search.hypotheses()) == [(0, 0), (0, 1), (0, 2)]


def test_of_hypotheses_with_one_score_the_older_is_better() -> None:
    """EOS .25 and x EOS .25 * .25, of scores ln(.25) and ln(.0625) / 2: the same number."""
    model = {(): (0.25, 0.25), (1,): (0.25, 0.75)}
    search = BeamSearch(
        BeamSearchParams(beam_width=2, max_tokens=9), eos_token_ids=(0,), max_output_tokens=9
    )
    for prefix in ((), (1,)):
        logprobs = np.log(np.asarray(model[prefix]))
        order = np.argsort(-logprobs, kind="stable")
        step = search.advance([BeamCandidates(order.astype(np.int32), logprobs[order])])
        search.apply(step)
    assert sequences(step.finished) == [(0,), (1, 0)]
    assert step.finished[0].score == step.finished[1].score


def test_a_step_can_be_dropped_and_computed_again() -> None:
    search = BeamSearch(
        BeamSearchParams(beam_width=2, max_tokens=8), eos_token_ids=(EOS,), max_output_tokens=8
    )
    search.apply(advance(search, MODEL))
    beams = search.beams
    first = advance(search, MODEL)
    assert search.beams is beams
    assert (search.num_tokens, search.hypotheses()) == (1, [])
    second = advance(search, MODEL)
    assert [(b.parent, b.token_id, b.cumulative_logprob) for b in first.beams] == [
        (b.parent, b.token_id, b.cumulative_logprob) for b in second.beams
    ]
    search.apply(second)
    with pytest.raises(ValueError, match="the step leads to token 2, the search is at token 2"):
        search.apply(first)


def test_misuse_is_refused() -> None:
    search = BeamSearch(
        BeamSearchParams(beam_width=2, max_tokens=1), eos_token_ids=(EOS,), max_output_tokens=1
    )
    row = candidates(MODEL[()], 4)
    with pytest.raises(ValueError, match="2 candidates were given for 1 beams"):
        search.advance([row, row])
    for bad in ([math.nan, -1.0], [-1.0, math.nan], [math.inf, -1.0], [-math.inf, -math.inf], []):
        broken = BeamCandidates(np.arange(len(bad), dtype=np.int32), np.asarray(bad, np.float64))
        with pytest.raises(ValueError, match="beam 0 has no finite largest log-probability"):
            search.advance([broken])
    search.apply(search.advance([row]))
    with pytest.raises(ValueError, match="the search is done"):
        search.advance([])


def test_impossible_tokens_never_follow() -> None:
    """Only one token can follow: of a width of 3 one beam runs, and one hypothesis is left."""
    row = BeamCandidates(
        np.array([2, 0, 1], np.int32), np.array([0.0, -math.inf, -math.inf], np.float64)
    )
    search = BeamSearch(
        BeamSearchParams(beam_width=3, max_tokens=2), eos_token_ids=(0,), max_output_tokens=2
    )
    search.apply(search.advance([row]))
    assert search.num_beams_running == 1
    search.apply(search.advance([row]))
    assert sequences(search.hypotheses()) == [(2, 2)]


def test_long_hypotheses() -> None:
    """Shared prefixes are walked, not recursed into."""
    length = 5000
    search = BeamSearch(
        BeamSearchParams(beam_width=1, max_tokens=length),
        eos_token_ids=(),
        max_output_tokens=length,
    )
    row = BeamCandidates(np.array([3], np.int32), np.array([-0.5]))
    while not search.done:
        search.apply(search.advance([row]))
    assert search.hypotheses()[0].token_ids == [3] * length
    assert search.hypotheses()[0].score == pytest.approx(-0.5)


def random_model(seed: int, vocab_size: int, depth: int) -> dict[Prefix, Sequence[float]]:
    rng = np.random.default_rng(seed)
    # Sharp and flat rows: some tokens are nearly certain, some rows are nearly uniform.
    return {
        prefix: rng.dirichlet(np.full(vocab_size, rng.choice([0.3, 1.0, 5.0]))).clip(1e-6).tolist()
        for length in range(depth)
        for prefix in itertools.product(range(vocab_size), repeat=length)
    }


def complete_sequences(
    model: Mapping[Prefix, Sequence[float]], depth: int, end_tokens: frozenset[int]
) -> dict[Prefix, float]:
    """Every sequence that ends with an end token or has `depth` tokens, and its log-probability."""
    complete: dict[Prefix, float] = {}
    open_sequences: dict[Prefix, float] = {(): 0.0}
    while open_sequences:
        extended: dict[Prefix, float] = {}
        for prefix, logprob in open_sequences.items():
            row = np.asarray(model[prefix])
            for token, probability in enumerate(row / row.sum()):
                target = complete if token in end_tokens or len(prefix) + 1 == depth else extended
                target[(*prefix, token)] = logprob + math.log(probability)
        open_sequences = extended
    return complete


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1 << 32),
    vocab_size=st.integers(2, 4),
    depth=st.integers(1, 4),
    num_end_tokens=st.integers(0, 2),
    length_penalty=st.sampled_from([-1.0, 0.0, 0.6, 1.0, 2.0]),
    early_stopping=st.sampled_from([False, "never"]),
)
def test_a_search_as_wide_as_the_tree_is_exhaustive(
    seed: int,
    vocab_size: int,
    depth: int,
    num_end_tokens: int,
    length_penalty: float,
    early_stopping: EarlyStopping,
) -> None:
    model = random_model(seed, vocab_size, depth)
    end_tokens = frozenset(range(num_end_tokens))
    logprobs = complete_sequences(model, depth, end_tokens)
    scores = {key: value / len(key) ** length_penalty for key, value in logprobs.items()}
    params = BeamSearchParams(
        beam_width=vocab_size**depth,
        max_tokens=depth,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
    )
    found = run(params, model, tuple(end_tokens)).hypotheses()
    assert set(sequences(found)) == set(logprobs)
    for hypothesis in found:
        key = tuple(hypothesis.token_ids)
        assert hypothesis.cumulative_logprob == pytest.approx(logprobs[key], abs=1e-5)
        assert hypothesis.score == pytest.approx(scores[key], abs=1e-5 * depth)
    in_order = [hypothesis.score for hypothesis in found]
    assert in_order == sorted(in_order, reverse=True)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1 << 32),
    beam_width=st.integers(1, 4),
    num_end_tokens=st.integers(0, 3),
    length_penalty=st.sampled_from([-1.0, 0.0, 1.0, 2.0]),
    early_stopping=st.sampled_from([False, True, "never"]),
)
def test_num_candidates_are_as_good_as_the_whole_vocabulary(
    seed: int,
    beam_width: int,
    num_end_tokens: int,
    length_penalty: float,
    early_stopping: EarlyStopping,
) -> None:
    vocab_size, depth = 12, 6
    params = BeamSearchParams(
        beam_width=beam_width,
        max_tokens=depth,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
    )
    end_tokens = tuple(range(num_end_tokens))
    few = BeamSearch(params, eos_token_ids=end_tokens, max_output_tokens=depth)
    every = BeamSearch(params, eos_token_ids=end_tokens, max_output_tokens=depth)
    assert few.num_candidates == beam_width + num_end_tokens
    while not every.done:
        rows = []
        for beam in every.beams:
            rng = np.random.default_rng([seed, *beam.token_ids])
            # Rounded to few levels: ties must not make a difference either.
            rows.append(rng.normal(0.0, 2.0, vocab_size).round().astype(np.float32))
        few.apply(few.advance([best_candidates(row, few.num_candidates) for row in rows]))
        every.apply(every.advance([best_candidates(row, vocab_size) for row in rows]))
        assert [b.token_ids for b in few.beams] == [b.token_ids for b in every.beams]
    assert few.done
    assert sequences(few.hypotheses()) == sequences(every.hypotheses())


def test_best_candidates() -> None:
    """Logits ln 1, ln 4, ln 2, ln 1: probabilities 1/8, 1/2, 1/4, 1/8; ties by the lower id."""
    logits = np.log(np.array([1, 4, 2, 1], np.float32))
    found = best_candidates(logits, 3)
    assert found.token_ids.dtype == np.int32
    assert found.logprobs.dtype == np.float64
    assert found.token_ids.tolist() == [1, 2, 0]
    assert np.exp(found.logprobs) == pytest.approx([0.5, 0.25, 0.125])
    assert best_candidates(logits, 9).token_ids.tolist() == [1, 2, 0, 3]
    assert best_candidates(np.zeros(1000, np.float32), 3).token_ids.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [
        (0.0, [0.5, 0.25]),
        (1e-6, [0.5, 0.25]),
        (1.0, [0.5, 0.25]),
        # Squared: 1, 16, 4, 1 of 22.
        (0.5, [16 / 22, 4 / 22]),
    ],
)
def test_temperatures_divide_the_logits(temperature: float, expected: list[float]) -> None:
    logits = np.log(np.array([1, 4, 2, 1], np.float32))
    found = best_candidates(logits, 2, temperature=temperature)
    assert np.exp(found.logprobs) == pytest.approx(expected)


def test_impossible_and_unusable_logits() -> None:
    banned = np.array([-np.inf, 0.0, -np.inf, 0.0], np.float32)
    assert best_candidates(banned, 3).token_ids.tolist() == [1, 3]
    assert np.exp(best_candidates(banned, 3).logprobs) == pytest.approx([0.5, 0.5])
    for value in (np.nan, np.inf, -np.inf):
        unusable = np.full(4, -np.inf, np.float32)
        unusable[2] = value
        assert len(best_candidates(unusable, 3).token_ids) == 0


def test_parameters_are_plain_values() -> None:
    params = BeamSearchParams(
        beam_width=4, max_tokens=9, early_stopping="never", stop_token_ids=[7, 7, 3], n=2
    )
    assert params.stop_token_ids == (7, 3)
    assert BeamSearchParams(**dataclasses.asdict(params)) == params
    assert BeamSearchParams(beam_width=3, max_tokens=1).num_returned == 3
    assert params.num_returned == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.beam_width = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"beam_width": 0}, "beam_width is 0, it must be at least 1"),
        ({"beam_width": 2.0}, "beam_width is 2.0, it must be an integer"),
        ({"max_tokens": 0}, "max_tokens is 0, it must be at least 1"),
        ({"max_tokens": None}, "max_tokens is None, it must be an integer"),
        ({"n": 0}, r"n is 0, it must lie in \[1, 4\]"),
        ({"n": 5}, r"n is 5, it must lie in \[1, 4\]: a beam search keeps beam_width hypotheses"),
        ({"n": True}, "n is True, it must be an integer"),
        ({"ignore_eos": 1}, "ignore_eos is 1, it must be True or False"),
        ({"detokenize": None}, "detokenize is None, it must be True or False"),
        ({"skip_special_tokens": "no"}, "skip_special_tokens is 'no', it must be True or False"),
        ({"temperature": -1.0}, "temperature is -1.0, it must be at least 0"),
        ({"temperature": math.nan}, "temperature is nan, it must be a finite number"),
        ({"length_penalty": math.nan}, r"length_penalty is nan, it must lie in \[-10, 10\]"),
        ({"length_penalty": -10.5}, r"length_penalty is -10.5, it must lie in \[-10, 10\]"),
        ({"length_penalty": "1"}, "length_penalty is '1', it must be a number"),
        ({"early_stopping": "always"}, "early_stopping is 'always', it must be True, False or \"n"),
        ({"early_stopping": 1}, "early_stopping is 1, it must be True, False or"),
        ({"stop_token_ids": [-2]}, "a value of stop_token_ids is -2, token ids start at 0"),
    ],
)
def test_a11_bad_values_are_refused(values: dict[str, Any], sentence: str) -> None:
    """A11: NaN in particular."""
    with pytest.raises(RequestError, match=sentence):
        BeamSearchParams(**{"beam_width": 4, "max_tokens": 16, **values})
