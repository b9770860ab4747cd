"""Engines of random tiny models through the whole runtime against Hugging Face's `generate`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from octavo.compiler import BuildConfig, build_engine
from octavo.runtime import LLM, SamplingParams
from octavo.runtime.sampling.beam_search import BeamSearchParams
from tests.parity import tiny_models

GenerationConfig: Any = transformers.GenerationConfig  # its constructor has no types

MAX_TOKENS = 16
EOS = 2
# So many that hypotheses end at every length, and some not at all.
STOP_TOKENS = tuple(range(3, tiny_models.VOCAB_SIZE, 5))
SCORE_TOLERANCE = 1e-5  # relative: length penalties make scores of any size


def tokens_of(length: int) -> list[int]:
    made: list[int] = (
        np.random.default_rng(length).integers(3, tiny_models.VOCAB_SIZE, length).tolist()
    )
    return made


# A single token, two with the same beginning, and three that are longer than gemma2's window.
PROMPTS = ([5], tokens_of(40), [*tokens_of(40)[:33], 9, 8], tokens_of(27))


@dataclass(frozen=True)
class Pair:
    """A model here and there."""

    llm: LLM
    model: Any

    def generate(self, prompt: Sequence[int], **options: Any) -> Any:
        """One prompt by Hugging Face."""
        rows = torch.tensor([prompt])
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
        return self.model.generate(
            rows, attention_mask=torch.ones_like(rows), generation_config=config
        )


@pytest.fixture(
    scope="module",
    params=[
        ("llama", "onnxruntime"),
        ("llama", "torch"),
        ("gemma2", "onnxruntime"),  # windows and capped scores
        ("gpt2", "onnxruntime"),  # learned positions, LayerNorm
    ],
    ids="-".join,
)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    model_type, backend = request.param
    folder = tmp_path_factory.mktemp(f"{model_type}-{backend}")
    checkpoint, model = tiny_models.checkpoint(folder / "model", model_type)
    untyped: Any = model
    untyped.generation_config = GenerationConfig()  # what a case leaves out is not filled from here
    config = BuildConfig(
        model=str(checkpoint),
        output=folder / "engine",
        backend=backend,
        max_model_len=128,
        use_cache=False,
    )
    with LLM(
        build_engine(config).path, num_kv_blocks=64, max_num_batched_tokens=24, num_threads=1
    ) as llm:
        yield Pair(llm, model)


def ids(prompts: Sequence[Sequence[int]]) -> list[dict[str, object]]:
    return [{"prompt_token_ids": list(prompt)} for prompt in prompts]


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
def test_beam_search(pair: Pair, length_penalty: float, early_stopping: Any) -> None:
    """All prompts in one call, in chunks of 24 tokens a step."""
    params = BeamSearchParams(
        beam_width=4,
        max_tokens=MAX_TOKENS,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        stop_token_ids=STOP_TOKENS,
    )
    outputs = pair.llm.beam_search(ids(PROMPTS), params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = pair.generate(
            prompt,
            num_beams=4,
            num_return_sequences=4,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            eos_token_id=[EOS, *STOP_TOKENS],
        )
        lengths = (expected.beam_indices >= 0).sum(dim=1).tolist()  # -1 behind a sequence's end
        rows = expected.sequences[:, len(prompt) :].tolist()
        assert [one.token_ids for one in output.outputs] == [
            row[:length] for row, length in zip(rows, lengths, strict=True)
        ]
        scores = [one.score for one in output.outputs]
        assert scores == pytest.approx(expected.sequences_scores.tolist(), rel=SCORE_TOLERANCE)


def test_length_penalties_choose_among_many_lengths(pair: Pair) -> None:
    """What the comparisons above stand on."""
    found = []
    for length_penalty in (0.0, 1.0, 2.0):
        params = BeamSearchParams(
            beam_width=4,
            max_tokens=MAX_TOKENS,
            length_penalty=length_penalty,
            stop_token_ids=STOP_TOKENS,
        )
        outputs = pair.llm.beam_search(ids(PROMPTS), params)
        found.append([len(one.token_ids) for output in outputs for one in output.outputs])
    assert len(set(found[0])) >= 5
    assert sum(found[0]) < sum(found[1]) < sum(found[2])


@pytest.mark.parametrize("repetition_penalty", [0.8, 1.1, 1.3, 2.0])
def test_repetition_penalty(pair: Pair, repetition_penalty: float) -> None:
    """S08: of prompt and output; greedy, so that each step's edit is seen."""
    params = SamplingParams(
        temperature=0.0, max_tokens=MAX_TOKENS, repetition_penalty=repetition_penalty
    )
    outputs = pair.llm.generate(ids(PROMPTS), params)
    plain = pair.llm.generate(ids(PROMPTS), SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = pair.generate(prompt, repetition_penalty=repetition_penalty, eos_token_id=EOS)
        assert output.outputs[0].token_ids == expected.sequences[0, len(prompt) :].tolist()
    assert any(
        one.outputs[0].token_ids != other.outputs[0].token_ids
        for one, other in zip(outputs, plain, strict=True)
    )
