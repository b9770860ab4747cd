"""The sampler against an independent float64 reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.graphs.errors import BackendError
from octavo.runtime.philox import philox4x32, uniform
from octavo.runtime.sampler import Sampler, SamplingRow
from octavo.runtime.sampling_params import SamplingParams

Float64Array = NDArray[np.float64]


def reference(
    logits: NDArray[np.float32], temperature: float, top_k: int = 0, top_p: float = 1.0
) -> Float64Array:
    """[V] f64: the distribution, by sorting all tokens and summing their probabilities."""
    scaled = logits.astype(np.float64) / temperature
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    if 0 < top_k < len(scaled):
        order = [i for i in order if scaled[i] >= scaled[order[top_k - 1]]]
    weights = {i: float(np.exp(scaled[i] - scaled[order[0]])) for i in order}
    total = sum(weights.values())
    kept, mass = [], 0.0
    for i in order:
        kept.append(i)
        mass += weights[i] / total
        if mass >= top_p:
            break
    probabilities: Float64Array = np.zeros(len(scaled))
    probabilities[kept] = [weights[i] for i in kept]
    probabilities /= probabilities.sum()
    return probabilities


def draw(
    logits: NDArray[np.float32], params: SamplingParams, count: int, vocab: int | None = None
) -> NDArray[np.int64]:
    """[count] tokens of one row at the positions 0, 1, ..."""
    sampler = Sampler(vocab or len(logits))
    rows = [SamplingRow(params, 1234, position) for position in range(count)]
    return np.array(sampler.sample(np.broadcast_to(logits, (count, len(logits))), rows))


def chi_square_excess(counts: NDArray[np.int64], probabilities: Float64Array) -> float:
    """Standard deviations by which chi-square lies above its mean; rare tokens count as one.

    By the Wilson-Hilferty transformation, which makes chi-square normal for few degrees as well.
    """
    expected = probabilities * counts.sum()
    rare = expected < 8
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    freedom = max(len(expected) - 1, 1)
    variance = 2 / (9 * freedom)
    return float(((chi_square / freedom) ** (1 / 3) - (1 - variance)) / np.sqrt(variance))


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


def test_uniform_numbers_are_uniform() -> None:
    values = np.array([uniform(seed, position) for seed in range(40) for position in range(250)])
    counts = np.histogram(values, bins=50, range=(0, 1))[0]
    assert values.min() >= 0
    assert values.max() < 1
    assert abs(chi_square_excess(counts, np.full(50, 1 / 50))) < 3.5
    assert uniform(3, 5) == uniform(3, 5)
    assert len({uniform(s, p) for s in (0, 1, 1 << 63) for p in (0, 1, 1 << 33)}) == 9


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 2.5},
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 7, "temperature": 2.0},
        {"top_p": 0.1},
        {"top_p": 0.5},
        {"top_p": 0.9},
        {"top_p": 0.999},
        {"top_p": 0.8, "temperature": 3.0},
        {"top_k": 12, "top_p": 0.7, "temperature": 1.5},
    ],
)
@pytest.mark.parametrize("vocab_size", [40, 700])
def test_draws_follow_the_reference(values: dict[str, Any], vocab_size: int) -> None:
    rng = np.random.default_rng(5)
    logits = (rng.normal(size=vocab_size) * 2.5).astype(np.float32)
    params = SamplingParams(**values)
    probabilities = reference(logits, params.temperature, params.top_k, params.top_p)
    tokens = draw(logits, params, 2500)
    counts = np.bincount(tokens, minlength=vocab_size)
    assert (probabilities[tokens] > 0).all()
    assert chi_square_excess(counts, probabilities) < 3.5


def test_ties_at_the_kth_token_are_kept() -> None:
    logits = np.array([1.0, 3.0, 2.0, 2.0, 2.0, 0.0], dtype=np.float32)
    assert set(draw(logits, SamplingParams(top_k=2), 300)) == {1, 2, 3, 4}


def test_of_ties_at_the_edge_of_top_p_the_first_are_kept() -> None:
    logits = np.zeros(10, dtype=np.float32)
    assert set(draw(logits, SamplingParams(top_p=0.35), 300)) == {0, 1, 2, 3}


def test_greedy_takes_the_first_of_the_largest() -> None:
    logits = np.array([1.0, 5.0, 5.0, 2.0], dtype=np.float32)
    assert set(draw(logits, SamplingParams(temperature=0), 3)) == {1}


def test_a12_a_tiny_temperature_is_nearly_greedy() -> None:
    """A12: no overflow, no NaN, whatever the size of the logits."""
    rng = np.random.default_rng(0)
    for scale in (1.0, 100.0, 1e30):
        logits = (rng.normal(size=500) * scale).astype(np.float32)
        for temperature in (1e-4, 2e-5, 1e-300):
            tokens = draw(logits, SamplingParams(temperature=temperature), 20)
            assert set(tokens) == {int(logits.argmax())}


def test_a_huge_temperature_is_uniform() -> None:
    logits = np.linspace(-5, 5, 20, dtype=np.float32)
    counts = np.bincount(draw(logits, SamplingParams(temperature=1e30), 4000), minlength=20)
    assert chi_square_excess(counts, np.full(20, 1 / 20)) < 4


def test_m18_padding_of_the_vocabulary_is_never_sampled() -> None:
    logits = np.zeros(64, dtype=np.float32)
    logits[50:] = 9.0
    for values in ({"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.5}):
        tokens = draw(logits, SamplingParams(**values), 200, vocab=50)
        assert tokens.max() < 50


def test_masked_logits_are_never_sampled() -> None:
    logits = np.full(600, -np.inf, dtype=np.float32)
    logits[[3, 599]] = 1.0
    for values in ({}, {"top_k": 5}, {"top_k": 2}, {"top_p": 0.9}):
        assert set(draw(logits, SamplingParams(**values), 100)) == {3, 599}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_broken_logits_are_refused(temperature: float, value: float) -> None:
    logits = np.zeros(8, dtype=np.float32)
    logits[5] = value
    with pytest.raises(BackendError, match="no token can be chosen"):
        draw(logits, SamplingParams(temperature=temperature), 1)


def test_a_rows_token_does_not_depend_on_the_other_rows() -> None:
    rng = np.random.default_rng(3)
    vocab_size = 3001
    logits = (rng.normal(size=(32, vocab_size)) * 3).astype(np.float32)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"top_k": 40},
        {"top_p": 0.9},
    ]
    rows = [SamplingRow(SamplingParams(**kinds[i % 4]), i, 100 + i) for i in range(32)]
    sampler = Sampler(vocab_size)
    together = sampler.sample(logits, rows)
    backwards = sampler.sample(logits[::-1], rows[::-1])[::-1]
    alone = [sampler.sample(logits[i : i + 1].copy(), [rows[i]])[0] for i in range(32)]
    assert together == backwards == alone
