"""The sampler against an independent float64 reference, and its log-probabilities against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo.backends.base import Float32Array
from octavo.graphs.errors import BackendError
from octavo.runtime.sampling.sampler import LogprobsRow, Sampler, SamplingRow
from octavo.runtime.sampling.sampling_params import SamplingParams
from tests.unit.philox import philox4x32, uniform
from tests.unit.sampling_reference import (
    SEED,
    assert_drawn,
    chi_square_excess,
    distribution,
    draw,
)

VOCAB_SIZE = 49152  # of SmolLM2
DRAWS = 20_000
# Chi-square of a right sampler is above it once in 30,000 tests; the draws are always the same.
MOST_EXCESS = 4.0


def random_logits(vocab_size: int, spread: float = 2.5, seed: int = 5) -> Float32Array:
    rng = np.random.default_rng(seed)
    return (rng.normal(size=vocab_size) * spread).astype(np.float32)


def draw_alone(logits: Float32Array, params: SamplingParams, count: int) -> set[int]:
    return set(draw(Sampler(len(logits)), logits, params, count).tolist())


def test_philox_equals_its_published_vectors() -> None:
    """Known answers of Random123 1.14 (kat_vectors, philox4x32 10)."""
    full = 0xFFFFFFFF
    assert philox4x32((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox4x32((full,) * 4, (full, full)) == (
        0x408F276D,
        0x41C83B0E,
        0xA20BC7C6,
        0x6D5451FD,
    )
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert philox4x32(pi, (0xA4093822, 0x299F31D0)) == (
        0xD16CFE09,
        0x94FDCCEB,
        0x5001E420,
        0x24126EA1,
    )


def test_random_numbers_are_those_of_philox() -> None:
    """Of 2^19 equal logits the token drawn is the first 19 bits of the number."""
    size = 1 << 19
    logits = np.zeros(size, np.float32)
    params = SamplingParams()
    streams = [
        (seed, position, choice)
        for seed in (0, 1, 0xFFFFFFFF, 1 << 32, (1 << 64) - 1)
        for position in (0, 1, 12345, (1 << 32) + 7)
        for choice in (0, 1, 5, (1 << 32) - 1)
    ]
    rows = [SamplingRow(logits, params, *stream) for stream in streams]
    wanted = [int(uniform(*stream) * size) for stream in streams]
    assert Sampler(size).sample(rows) == wanted
    assert len(set(wanted)) == len(streams)


def test_without_a_choice_the_first_is_meant() -> None:
    logits = np.zeros(500, np.float32)
    sampler = Sampler(500)
    params = SamplingParams()
    first, same, second = sampler.sample(
        [
            SamplingRow(logits, params, 3, 4),
            SamplingRow(logits, params, 3, 4, 0),
            SamplingRow(logits, params, 3, 4, 1),
        ]
    )
    assert first == same != second


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 2.5},
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 7, "temperature": 2.0},
        {"top_k": 300, "temperature": 4.0},
        {"top_k": 5000, "temperature": 3.0},
        {"top_p": 0.1},
        {"top_p": 0.5},
        {"top_p": 0.9},
        {"top_p": 0.999},
        {"top_p": 0.8, "temperature": 3.0},
        {"min_p": 0.3},
        {"min_p": 0.02},
        {"min_p": 0.001, "temperature": 2.0},
        {"top_k": 12, "top_p": 0.7, "temperature": 1.5},
        {"top_k": 50, "top_p": 0.9},
        {"min_p": 0.01, "top_p": 0.8},
        {"min_p": 0.05, "top_k": 20},
        {"min_p": 0.005, "top_k": 4000, "top_p": 0.95, "temperature": 2.0},
    ],
)
@pytest.mark.parametrize("vocab_size", [40, VOCAB_SIZE])
def test_draws_follow_the_reference(values: dict[str, Any], vocab_size: int) -> None:
    logits = random_logits(vocab_size)
    params = SamplingParams(**values)
    wanted = distribution(logits, params)
    tokens = draw(Sampler(vocab_size), logits, params, DRAWS)
    assert_drawn(tokens, wanted)
    counts = np.bincount(tokens, minlength=vocab_size)
    # By id and by probability: errors in the draw show in the one, in the kept set in the other.
    for order in (np.arange(vocab_size), np.argsort(-wanted.probabilities, kind="stable")):
        assert chi_square_excess(counts[order], wanted.probabilities[order]) < MOST_EXCESS


def test_the_reference_notices_a_distribution_that_is_slightly_wrong() -> None:
    """The tests above can fail: 10% more temperature, or one token too many, is found."""
    logits = random_logits(40)
    params = SamplingParams(top_k=7)
    tokens = draw(Sampler(40), logits, params, DRAWS)
    counts = np.bincount(tokens, minlength=40)
    warmer = distribution(logits, SamplingParams(top_k=7, temperature=1.1))
    assert chi_square_excess(counts, warmer.probabilities) > 2 * MOST_EXCESS
    with pytest.raises(AssertionError):
        assert_drawn(tokens, distribution(logits, SamplingParams(top_k=8)))


def test_a_large_top_k_keeps_exactly_so_many() -> None:
    """At a temperature so high that all are equally likely every kept token is drawn at last."""
    logits = random_logits(6000)
    order = np.argsort(-logits)
    tokens = draw(Sampler(6000), logits, SamplingParams(top_k=1200, temperature=1e30), DRAWS)
    np.testing.assert_array_equal(np.unique(tokens), np.sort(order[:1200]))
    # Among equally likely tokens the logits decide still, and half of 1200 are 600.
    params = SamplingParams(top_k=1200, top_p=0.5, temperature=1e30)
    tokens = draw(Sampler(6000), logits, params, DRAWS)
    np.testing.assert_array_equal(np.unique(tokens), np.sort(order[:600]))


def test_ties_at_the_kth_token_are_kept() -> None:
    logits = np.array([1.0, 3.0, 2.0, 2.0, 2.0, 0.0], dtype=np.float32)
    assert draw_alone(logits, SamplingParams(top_k=2), 300) == {1, 2, 3, 4}


def test_the_two_zeros_tie() -> None:
    logits = np.array([-0.0, 0.0, -0.0, -1.0], dtype=np.float32)
    assert draw_alone(logits, SamplingParams(top_k=1), 300) == {0, 1, 2}
    assert draw_alone(logits, SamplingParams(top_p=0.5), 300) == {0, 1}
    assert draw_alone(logits, SamplingParams(temperature=0.0), 1) == {0}
    logits = np.array([-0.0, 0.0, 0.0, -1.0], dtype=np.float32)
    assert draw_alone(logits, SamplingParams(top_p=0.2), 300) == {0}


@pytest.mark.parametrize(("top_p", "count"), [(0.35, 4), (0.3, 3), (0.5, 5), (0.01, 1), (0.91, 10)])
def test_of_ties_at_the_edge_of_top_p_the_first_are_kept(top_p: float, count: int) -> None:
    logits = np.zeros(10, dtype=np.float32)
    assert draw_alone(logits, SamplingParams(top_p=top_p), 300) == set(range(count))


def test_of_many_ties_the_first_are_kept() -> None:
    """More of them than are sorted, over several blocks of the row, below a few larger ones."""
    logits = np.zeros(6000, dtype=np.float32)
    logits[[100, 5999]] = 5.0
    share = np.exp(5.0) * 2 / (np.exp(5.0) * 2 + 5998)
    params = SamplingParams(top_p=float(share + 2500.5 / (np.exp(5.0) * 2 + 5998)))
    wanted = distribution(logits, params)
    assert len(wanted.kept) == 2503
    assert wanted.kept[-2:].tolist() == [2501, 5999]
    assert_drawn(draw(Sampler(6000), logits, params, DRAWS), wanted)


def test_greedy_takes_the_first_of_the_largest() -> None:
    logits = np.array([1.0, 5.0, 5.0, 2.0], dtype=np.float32)
    assert draw_alone(logits, SamplingParams(temperature=0), 3) == {1}
    # Of one block in another lane, of another block in the same lane, at the very end.
    for size, largest in ((700, [37, 250]), (700, [255, 256]), (700, [699]), (1, [0])):
        logits = np.full(size, -3.0, dtype=np.float32)
        logits[largest] = -2.5
        assert draw_alone(logits, SamplingParams(temperature=0), 1) == {largest[0]}


def test_a12_a_tiny_temperature_is_nearly_greedy() -> None:
    """A12: no overflow, no NaN, whatever the size of the logits."""
    for scale in (1.0, 100.0, 1e30, 1e38):
        logits = random_logits(500, 1.0) * np.float32(scale)
        for temperature in (1e-4, 2e-5, 1e-300):
            for values in ({}, {"top_p": 0.9}, {"top_k": 9}, {"min_p": 0.1}):
                params = SamplingParams(temperature=temperature, **values)
                assert draw_alone(logits, params, 20) == {int(logits.argmax())}


def test_a12_near_ties_share_at_a_tiny_temperature() -> None:
    logits = random_logits(300)
    logits[[7, 9]] = 20.0, np.float32(20.0) - np.float32(1e-4)
    params = SamplingParams(temperature=1e-4)
    assert_drawn(draw(Sampler(300), logits, params, 1000), distribution(logits, params))


@pytest.mark.parametrize("temperature", [1e30, 1e300])
def test_a_huge_temperature_is_uniform(temperature: float) -> None:
    logits = np.linspace(-5, 5, 20, dtype=np.float32)
    params = SamplingParams(temperature=temperature)
    counts = np.bincount(draw(Sampler(20), logits, params, 4000), minlength=20)
    assert chi_square_excess(counts, np.full(20, 1 / 20)) < MOST_EXCESS
    logits[:5] = -np.inf
    assert draw_alone(logits, params, 400) == set(range(5, 20))


def test_limits_of_the_parameters() -> None:
    logits = random_logits(3000)
    best = {int(logits.argmax())}
    for values in ({"top_p": 1e-300}, {"min_p": 1.0}, {"top_k": 1}, {"top_p": 1e-3, "top_k": 2}):
        assert draw_alone(logits, SamplingParams(**values), 200) == best
    everything = draw(Sampler(3000), logits, SamplingParams(), 2000)
    for values in (
        {"top_k": 3000}, {"top_k": 1 << 40}, {"top_k": -1}, {"min_p": 0.0}, {"min_p": 1e-300},
        {"top_p": 1.0},
    ):  # fmt: skip
        same = draw(Sampler(3000), logits, SamplingParams(**values), 2000)
        np.testing.assert_array_equal(same, everything)


def test_tokens_too_unlikely_to_matter_are_no_trouble() -> None:
    """Weights far below the smallest float, about it, and those that round to nothing."""
    logits = np.concatenate([[0.0], np.linspace(-200, -20, 5000)]).astype(np.float32)
    for values in ({}, {"top_p": 0.999999999}, {"top_k": 3000}, {"min_p": 1e-40}):
        assert draw_alone(logits, SamplingParams(**values), 500) == {0}


def test_m18_padding_of_the_vocabulary_is_never_sampled() -> None:
    """M18: rows of the padded vocabulary have no probability, however large their logits."""
    logits = np.zeros(64, dtype=np.float32)
    logits[50:] = 9.0
    logits[60:] = np.nan
    sampler = Sampler(50)
    for values in ({"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}):
        tokens = draw(sampler, logits, SamplingParams(**values), 200)
        assert tokens.min() >= 0
        assert tokens.max() < 50
    (row,) = sampler.logprobs([LogprobsRow(logits, 3, 50)])
    assert row.logprob == pytest.approx(-np.log(50), abs=1e-12)
    assert row.token_ids.tolist() == list(range(50))


@pytest.mark.parametrize("vocab_size", [1, 2, 600, 5000])
def test_masked_logits_are_never_sampled(vocab_size: int) -> None:
    logits = np.full(vocab_size, -np.inf, dtype=np.float32)
    allowed = {0, vocab_size - 1}
    logits[list(allowed)] = 1.0
    for values in ({}, {"top_k": 5}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.2}, {"top_k": 400}):
        assert draw_alone(logits, SamplingParams(**values), 100) == allowed
    logits[0], logits[vocab_size - 1] = -2e30, -1e30
    for values in ({}, {"top_k": 1}, {"top_p": 0.1}, {"temperature": 0.0}, {"temperature": 50.0}):
        assert draw_alone(logits, SamplingParams(**values), 20) == {vocab_size - 1}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("position", [0, 17, 255, 256, 599])
def test_rows_that_are_not_finite_have_no_token(
    temperature: float, value: float, position: int
) -> None:
    """Others of the batch keep theirs."""
    broken, masked, whole = np.zeros((3, 600), dtype=np.float32)
    broken[position] = value
    broken[3] = -np.inf
    masked[:] = -np.inf
    params = SamplingParams(temperature=temperature, top_k=5, top_p=0.9)
    rows = [SamplingRow(logits, params, 1, 2) for logits in (broken, whole, masked)]
    first, token, last = Sampler(600).sample(rows)
    assert (first, last) == (-1, -1)
    assert 0 <= token < 600
    (row,) = Sampler(600).logprobs([LogprobsRow(broken, 1, 2)])
    assert np.isnan([row.logprob, *row.logprobs]).all()
    assert (row.rank, row.token_ids.tolist()) == (-1, [-1, -1])


def test_a_rows_token_does_not_depend_on_the_other_rows() -> None:
    vocab_size = 3001
    rng = np.random.default_rng(3)
    logits = (rng.normal(size=(32, vocab_size)) * 3).astype(np.float32)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"top_k": 40},
        {"top_p": 0.9},
        {"min_p": 0.02, "top_k": 2000, "top_p": 0.99},
    ]
    rows = [SamplingRow(logits[i], SamplingParams(**kinds[i % 5]), i, 100 + i) for i in range(32)]
    sampler = Sampler(vocab_size)
    together = sampler.sample(rows)
    backwards = sampler.sample(rows[::-1])[::-1]
    alone = [sampler.sample([row._replace(logits=row.logits.copy())])[0] for row in rows]
    assert together == backwards == alone


def test_logits_are_not_changed_and_may_be_read_only() -> None:
    logits = random_logits(3000)
    before = logits.copy()
    logits.flags.writeable = False
    for values in ({}, {"top_k": 40}, {"top_p": 0.9}):
        draw_alone(logits, SamplingParams(**values), 3)
    Sampler(3000).logprobs([LogprobsRow(logits, 1, 3000)])
    np.testing.assert_array_equal(logits, before)


def test_no_rows_have_no_tokens() -> None:
    assert Sampler(5).sample([]) == []
    assert Sampler(5).logprobs([]) == []


@pytest.mark.parametrize(
    "logits",
    [
        np.zeros(9, np.float32),
        np.zeros(10, np.float64),
        np.zeros(20, np.float32)[::2],
        np.zeros((2, 10), np.float32),
    ],
)
def test_rows_that_cannot_be_read_are_refused(logits: Any) -> None:
    with pytest.raises(BackendError, match=r"^logits are .* the sampler reads float32 \[10\]"):
        Sampler(10).sample([SamplingRow(logits, SamplingParams(), SEED, 0)])
    with pytest.raises(BackendError, match="give it contiguous rows"):
        Sampler(10).logprobs([LogprobsRow(logits, 0, 1)])


@pytest.mark.parametrize("size", [0, (1 << 19) + 1])
def test_vocabularies_that_cannot_be_summed_exactly_are_refused(size: int) -> None:
    with pytest.raises(BackendError, match=f"^a vocabulary of {size} tokens .* 1 to 524288 "):
        Sampler(size)


@pytest.mark.parametrize("vocab_size", [1, 40, 5000, VOCAB_SIZE])
@pytest.mark.parametrize("num_logprobs", [0, 1, 5, 300, VOCAB_SIZE])
def test_s09_log_probabilities_are_those_of_the_raw_logits(
    vocab_size: int, num_logprobs: int
) -> None:
    """S09: real ones, with ranks, most likely tokens first."""
    count = min(num_logprobs, vocab_size)
    for spread, tie in ((2.5, 0.0), (0.5, 0.0), (12.0, 0.0), (2.5, 0.25)):
        logits = random_logits(vocab_size, spread)
        if tie:
            logits = (np.rint(logits / tie) * tie).astype(np.float32)
        exact = logits.astype(np.float64)
        wanted = exact - np.log(np.exp(exact - exact.max()).sum()) - exact.max()
        order = np.lexsort((np.arange(vocab_size), -exact))
        tokens = [0, vocab_size // 2, vocab_size - 1, int(order[0]), int(order[-1])]
        rows = Sampler(vocab_size).logprobs([LogprobsRow(logits, t, num_logprobs) for t in tokens])
        for token, row in zip(tokens, rows, strict=True):
            assert row.logprob == pytest.approx(wanted[token], abs=1e-6)
            assert row.rank == 1 + int((logits > logits[token]).sum())
            np.testing.assert_array_equal(row.token_ids, order[:count])
            np.testing.assert_allclose(row.logprobs, wanted[order[:count]], atol=1e-6)
            assert row.logprobs.dtype == np.float64
            if token in row.token_ids:
                assert row.logprob == row.logprobs[row.token_ids.tolist().index(token)]


def test_log_probabilities_of_tokens_that_cannot_be() -> None:
    logits = np.zeros(6, np.float32)
    logits[[1, 4]] = -np.inf
    sampler = Sampler(5)
    masked, padding, negative = sampler.logprobs([LogprobsRow(logits, t, 5) for t in (1, 5, -1)])
    assert (masked.logprob, masked.rank) == (-np.inf, 4)
    assert masked.token_ids.tolist() == [0, 2, 3, 1, 4]
    assert masked.logprobs[3:].tolist() == [-np.inf, -np.inf]
    for outside in (padding, negative):
        assert (outside.logprob, outside.rank) == (-np.inf, 5)
    assert masked.logprobs[0] == pytest.approx(-np.log(3), abs=1e-12)
    (row,) = Sampler(3).logprobs([LogprobsRow(np.array([-np.inf, -np.inf, 1], np.float32), 2, 2)])
    assert row.token_ids.tolist() == [2, 0]


def test_rows_may_ask_for_different_numbers_of_logprobs() -> None:
    logits = random_logits(1000)
    sampler = Sampler(1000)
    together = sampler.logprobs([LogprobsRow(logits, 7, count) for count in (3, 0, 1000, 20)])
    for count, row in zip((3, 0, 1000, 20), together, strict=True):
        (alone,) = sampler.logprobs([LogprobsRow(logits, 7, count)])
        assert len(row.token_ids) == len(row.logprobs) == count
        assert (alone.logprob, alone.rank) == (row.logprob, row.rank)
        np.testing.assert_array_equal(row.token_ids, together[2].token_ids[:count])
        np.testing.assert_array_equal(row.logprobs, together[2].logprobs[:count])
