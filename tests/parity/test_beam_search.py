"""Beam search against Hugging Face's `generate`: the same sequences, the same scores."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

import pytest
import torch
import transformers
from torch import nn

from octavo.runtime.sampling.beam_search import (
    BeamCandidates,
    BeamHypothesis,
    BeamSearch,
    BeamSearchParams,
    best_candidates,
)
from tests.parity import tiny_models

GenerationConfig: Any = transformers.GenerationConfig  # its constructor has no types
EarlyStopping = bool | Literal["never"]

# Of one length, so that Hugging Face runs them as one batch without padding.
PROMPTS = (
    (1, 17, 80, 203, 9),
    (1, 5, 5, 144, 61),
    (1, 250, 33, 98, 12),
    (1, 71, 2, 160, 230),
    (1, 99, 98, 97, 96),
)
MAX_TOKENS = 12
END_TOKENS = (2, 11, 40)
# Added to the logits of END_TOKENS: with the first, most searches run to the last token.
END_BIASES = (2.0, 3.0)
SCORE_TOLERANCE = 1e-4


@functools.cache
def random_model(end_bias: float) -> Any:
    """A tiny Llama that ends some sequences within few tokens and never ends others."""
    made: Any = tiny_models.model("llama")
    head = nn.Linear(made.config.hidden_size, tiny_models.VOCAB_SIZE)
    with torch.no_grad():
        head.weight.copy_(made.lm_head.weight)
        head.bias.zero_()
        for index, token_id in enumerate(END_TOKENS):
            head.bias[token_id] = end_bias * (1.0 - 0.2 * index)
    made.lm_head = head
    made.generation_config = GenerationConfig()  # what a case leaves out is not filled from here
    return made.eval()


@functools.cache
def candidates(end_bias: float, token_ids: tuple[int, ...], count: int) -> BeamCandidates:
    """What follows `token_ids`, by a plain forward pass without a cache."""
    with torch.no_grad():
        logits = random_model(end_bias)(torch.tensor([token_ids])).logits[0, -1]
    return best_candidates(logits.numpy(), count)


def search(
    end_bias: float,
    prompt: tuple[int, ...],
    params: BeamSearchParams,
    eos_token_ids: Sequence[int],
) -> list[BeamHypothesis]:
    beam_search = BeamSearch(
        params, eos_token_ids=eos_token_ids, max_output_tokens=params.max_tokens
    )
    while not beam_search.done:
        following = [
            candidates(end_bias, (*prompt, *beam.token_ids), beam_search.num_candidates)
            for beam in beam_search.beams
        ]
        beam_search.apply(beam_search.advance(following))
    return beam_search.hypotheses()


def generate(
    end_bias: float, params: BeamSearchParams, end_token_ids: Sequence[int]
) -> list[list[tuple[list[int], float]]]:
    """For each of PROMPTS Hugging Face's generated tokens and scores, best first."""
    config = GenerationConfig(
        num_beams=params.beam_width,
        num_return_sequences=params.num_returned,
        do_sample=False,
        max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_id=list(end_token_ids) or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    prompts = torch.tensor(PROMPTS)
    output = random_model(end_bias).generate(
        prompts, attention_mask=torch.ones_like(prompts), generation_config=config
    )
    generated = output.sequences[:, prompts.shape[1] :]
    lengths = (output.beam_indices >= 0).sum(dim=1)  # -1 behind a sequence's end
    rows = [
        (row[:length].tolist(), float(score))
        for row, length, score in zip(generated, lengths, output.sequences_scores, strict=True)
    ]
    count = params.num_returned
    return [rows[start : start + count] for start in range(0, len(rows), count)]


def assert_equal_to_generate(
    params: BeamSearchParams, eos_token_ids: Sequence[int]
) -> list[BeamHypothesis]:
    """Compares all models and prompts; returns the hypotheses of all."""
    end_token_ids = () if params.ignore_eos else eos_token_ids
    found = []
    for end_bias in END_BIASES:
        expected = generate(end_bias, params, [*end_token_ids, *(params.stop_token_ids or ())])
        for prompt, rows in zip(PROMPTS, expected, strict=True):
            hypotheses = search(end_bias, prompt, params, eos_token_ids)
            assert [hypothesis.token_ids for hypothesis in hypotheses] == [row[0] for row in rows]
            scores = [hypothesis.score for hypothesis in hypotheses]
            assert scores == pytest.approx([row[1] for row in rows], abs=SCORE_TOLERANCE)
            found += hypotheses
    return found


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 1.0, 2.0, -1.0])
@pytest.mark.parametrize("eos_token_ids", [(2,), END_TOKENS])
def test_width_4(
    eos_token_ids: tuple[int, ...], length_penalty: float, early_stopping: EarlyStopping
) -> None:
    assert_equal_to_generate(
        BeamSearchParams(
            beam_width=4,
            max_tokens=MAX_TOKENS,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
        ),
        eos_token_ids,
    )


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize(("beam_width", "length_penalty"), [(2, 1.0), (3, 0.6), (3, -1.0)])
def test_other_widths(
    beam_width: int, length_penalty: float, early_stopping: EarlyStopping
) -> None:
    assert_equal_to_generate(
        BeamSearchParams(
            beam_width=beam_width,
            max_tokens=MAX_TOKENS,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
        ),
        (2, 11),
    )


def test_a_search_ends_by_tokens_and_by_length() -> None:
    """Also shows that the models above end sequences early, late and not at all."""
    params = BeamSearchParams(beam_width=4, max_tokens=MAX_TOKENS)
    hypotheses = assert_equal_to_generate(params, END_TOKENS)
    stopped = [h for h in hypotheses if h.finish_reason == "stop"]
    cut = [h for h in hypotheses if h.finish_reason == "length"]
    assert len(stopped) + len(cut) == len(hypotheses)
    lengths = {len(h.token_ids) for h in stopped}
    assert min(lengths) == 1
    assert len(lengths) >= 6
    assert {h.token_ids[-1] for h in stopped} == set(END_TOKENS)
    assert cut
    assert {len(h.token_ids) for h in cut} == {MAX_TOKENS}
    assert not {h.token_ids[-1] for h in cut} & set(END_TOKENS)


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_short_limits(max_tokens: int) -> None:
    assert_equal_to_generate(BeamSearchParams(beam_width=4, max_tokens=max_tokens), (2,))


def test_fewer_sequences_than_beams_are_returned() -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=MAX_TOKENS, n=2)
    assert len(assert_equal_to_generate(params, (2,))) == 2 * len(PROMPTS) * len(END_BIASES)


def test_stop_tokens_end_hypotheses_as_further_eos_tokens_do() -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=MAX_TOKENS, stop_token_ids=(11, 40))
    hypotheses = assert_equal_to_generate(params, (2,))
    assert {h.stop_reason for h in hypotheses if h.finish_reason == "stop"} == {None, 11, 40}


def test_ignored_eos_tokens_end_nothing() -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    hypotheses = assert_equal_to_generate(params, (2,))
    assert {h.finish_reason for h in hypotheses} == {"length"}
    assert any(2 in h.token_ids[:-1] for h in hypotheses)
