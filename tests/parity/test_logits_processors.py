"""Edits of logits against Hugging Face's processors, where both mean the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation import logits_process

from octavo.backends.base import Float32Array
from octavo.runtime.sampling.logits_processors import LogitsRow, apply_processors, make_processors
from octavo.runtime.sampling.sampling_params import SamplingParams

VOCAB = 300
EOS = (2, 299)


def random_tokens(rng: np.random.Generator, count: int, vocab_size: int = VOCAB) -> list[int]:
    tokens: list[int] = rng.integers(0, vocab_size, count).tolist()
    return tokens


def ours(
    logits: Float32Array,
    prompt: Sequence[int],
    output: Sequence[int],
    params: SamplingParams,
    words: dict[str, list[int]] | None = None,
) -> Float32Array:
    processors = make_processors(
        params, eos_token_ids=EOS, vocab_size=VOCAB, encode=(words or {}).__getitem__
    )
    row = LogitsRow(logits, np.array(prompt, np.int32), np.array(output, np.int32))
    apply_processors(processors, row)
    return row.values


def theirs(processor: Any, logits: Float32Array, token_ids: Sequence[int]) -> Float32Array:
    scores = processor(torch.tensor([token_ids]), torch.from_numpy(logits.copy())[None])
    result: Float32Array = scores[0].numpy()
    return result


@pytest.mark.parametrize("penalty", [0.8, 1.1, 1.3, 2.0])
def test_repetition_penalty(penalty: float) -> None:
    rng = np.random.default_rng(1)
    processor = logits_process.RepetitionPenaltyLogitsProcessor(penalty)
    for length in range(1, 200, 11):
        logits = rng.normal(0, 5, VOCAB).astype(np.float32)
        tokens = random_tokens(rng, length)
        prompt, output = tokens[: length // 2], tokens[length // 2 :]
        found = ours(logits, prompt, output, SamplingParams(repetition_penalty=penalty))
        np.testing.assert_array_equal(found, theirs(processor, logits, tokens))


def test_min_tokens() -> None:
    rng = np.random.default_rng(2)
    prompt = random_tokens(rng, 9)
    processor = logits_process.MinNewTokensLengthLogitsProcessor(9, 4, list(EOS), device="cpu")
    for num_output in range(7):
        logits = rng.normal(0, 5, VOCAB).astype(np.float32)
        output = random_tokens(rng, num_output)
        found = ours(logits, prompt, output, SamplingParams(min_tokens=4))
        np.testing.assert_array_equal(found, theirs(processor, logits, prompt + output))


def test_bad_words() -> None:
    """Theirs looks into the prompt as well: here there is none."""
    rng = np.random.default_rng(3)
    words = {"a": [4], " a": [5, 4], "b": [6, 4, 7], " b": [4, 4], "c": [9], " c": [9]}
    processor = logits_process.NoBadWordsLogitsProcessor(list(words.values()), eos_token_id=None)
    params = SamplingParams(bad_words=["a", "b", "c"])
    for length in range(1, 120):
        logits = rng.normal(0, 5, VOCAB).astype(np.float32)
        # Few tokens, so that the beginnings of words come often.
        output = [4 + token for token in random_tokens(rng, length % 5 + 1, 4)]
        found = ours(logits, [], output, params, words)
        np.testing.assert_array_equal(found, theirs(processor, logits, output))


def test_logit_bias() -> None:
    rng = np.random.default_rng(4)
    bias = {
        int(token): float(value)
        for token, value in zip(rng.permutation(VOCAB)[:20], range(-10, 10), strict=True)
    }
    processor = logits_process.SequenceBiasLogitsProcessor(
        [[[token], value] for token, value in bias.items()]
    )
    logits = rng.normal(0, 5, VOCAB).astype(np.float32)
    found = ours(logits, [1], [2], SamplingParams(logit_bias=bias))
    np.testing.assert_array_equal(found, theirs(processor, logits, [1, 2]))
