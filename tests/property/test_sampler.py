"""Any logits and parameters: the kept set and the draw are the reference's, in any batch."""

from __future__ import annotations

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from octavo.backends.base import Float32Array
from octavo.runtime.sampling.sampler import LogprobsRow, Sampler, SamplingRow
from octavo.runtime.sampling.sampling_params import SamplingParams
from tests.unit.sampling_reference import TOLERANCE, assert_drawn, distribution, draw

PARAMETERS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([1e-4, 0.3, 1.0, 5.0]),
    top_k=st.integers(-1, 80),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 1.0)),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1 << 32),
    vocab_size=st.integers(1, 2500),
    # Few levels make many ties.
    levels=st.sampled_from([1, 2, 5, 40, 1 << 20]),
    masked=st.sampled_from([0.0, 0.5, 0.99]),
    params=PARAMETERS,
)
def test_tokens_are_those_of_the_reference(
    seed: int, vocab_size: int, levels: int, masked: float, params: SamplingParams
) -> None:
    rng = np.random.default_rng(seed)
    spread = max(levels / 12, 1.0)
    logits = (rng.integers(-levels, levels, size=vocab_size) / spread).astype(np.float32)
    logits[rng.random(vocab_size) < masked] = -np.inf
    logits[rng.integers(vocab_size)] = 0.25
    wanted = distribution(logits, params)
    # A sum or a share that meets a limit to the last digits may fall on either side of it.
    assume(wanted.margin > TOLERANCE)
    tokens = draw(Sampler(vocab_size), logits, params, 400)
    assert_drawn(tokens, wanted)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1 << 32),
    vocab_size=st.integers(1, 40),
    levels=st.integers(1, 6),
    params=PARAMETERS,
)
def test_every_kept_token_is_drawn_and_no_other(
    seed: int, vocab_size: int, levels: int, params: SamplingParams
) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.integers(0, levels, size=vocab_size).astype(np.float32)
    wanted = distribution(logits, params)
    assume(wanted.margin > TOLERANCE)
    draws = 4000
    drawn = set(draw(Sampler(vocab_size), logits, params, draws).tolist())
    assert drawn <= set(wanted.kept.tolist())
    # Of one that is expected 25 times, none in 10^11 tests would be missing.
    assert drawn >= set(np.flatnonzero(wanted.probabilities * draws > 25).tolist())


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1 << 32),
    vocab_size=st.integers(1, 3000),
    all_params=st.lists(
        st.one_of(PARAMETERS, st.just(SamplingParams(temperature=0.0))), min_size=1, max_size=12
    ),
)
def test_a_row_has_the_same_token_in_every_batch(
    seed: int, vocab_size: int, all_params: list[SamplingParams]
) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=(len(all_params), vocab_size)) * 3).astype(np.float32)
    rows = [
        SamplingRow(logits[i], params, seed + i, 7 * i, i % 3)
        for i, params in enumerate(all_params)
    ]
    sampler = Sampler(vocab_size)
    alone = [sampler.sample([row])[0] for row in rows]
    some = [int(index) for index in rng.integers(0, len(rows), size=2 * len(rows))]
    # Copies lie elsewhere in memory, aligned otherwise.
    moved = [rows[i]._replace(logits=_unaligned(rows[i].logits, i)) for i in some]
    assert sampler.sample([rows[i] for i in some]) == [alone[i] for i in some]
    assert sampler.sample(moved) == [alone[i] for i in some]
    for row, token in zip(rows, alone, strict=True):
        if row.params.greedy:
            assert token == int(row.logits.argmax())


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1 << 32),
    vocab_size=st.integers(1, 3000),
    levels=st.sampled_from([1, 3, 1 << 20]),
    num_logprobs=st.integers(0, 3000),
)
def test_the_most_likely_tokens_are_those_of_sorting_all(
    seed: int, vocab_size: int, levels: int, num_logprobs: int
) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.integers(-levels, levels, size=vocab_size) * (8 / levels)).astype(np.float32)
    token = int(rng.integers(vocab_size))
    (row,) = Sampler(vocab_size).logprobs([LogprobsRow(logits, token, num_logprobs)])
    wanted = np.lexsort((np.arange(vocab_size), -logits))[:num_logprobs]
    np.testing.assert_array_equal(row.token_ids, wanted)
    assert row.rank == 1 + int((logits > logits[token]).sum())
    exact = logits.astype(np.float64)
    logprobs = exact - np.log(np.exp(exact).sum())
    assert abs(row.logprob - logprobs[token]) < 1e-6
    np.testing.assert_allclose(row.logprobs, logprobs[wanted], atol=1e-6)


def _unaligned(logits: Float32Array, shift: int) -> Float32Array:
    room = np.full(len(logits) + 32, 1e30, np.float32)  # what lies beside a row is not read
    copy = room[1 + shift : 1 + shift + len(logits)]
    copy[:] = logits
    return copy
