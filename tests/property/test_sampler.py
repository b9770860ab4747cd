"""Any logits and parameters: the token is one that the reference keeps, alone and in a batch."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.runtime.sampler import Sampler, SamplingRow
from octavo.runtime.sampling_params import SamplingParams
from tests.unit.test_runtime_sampler import reference


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1 << 32),
    vocab_size=st.integers(1, 600),
    levels=st.integers(1, 40),
    temperature=st.sampled_from([0.0, 1e-4, 0.3, 1.0, 5.0]),
    top_k=st.integers(-1, 80),
    top_p=st.floats(0.01, 1.0),
)
def test_tokens_are_among_the_kept_ones(
    seed: int, vocab_size: int, levels: int, temperature: float, top_k: int, top_p: float
) -> None:
    rng = np.random.default_rng(seed)
    # Few levels make many ties.
    logits = rng.integers(-levels, levels, size=(3, vocab_size)).astype(np.float32)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    rows = [SamplingRow(params, seed, position) for position in range(3)]
    sampler = Sampler(vocab_size)
    tokens = sampler.sample(logits, rows)
    for index, token in enumerate(tokens):
        if params.greedy:
            assert token == int(logits[index].argmax())
        else:
            # A cumulative sum that meets top_p to the last bit may fall on either side.
            kept = reference(logits[index], temperature, top_k, min(1.0, top_p + 1e-6))
            assert kept[token] > 0
        assert sampler.sample(logits[index : index + 1].copy(), [rows[index]]) == [token]
