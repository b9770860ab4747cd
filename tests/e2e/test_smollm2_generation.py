"""Beam search and edited logits on the real model against transformers' `generate`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from octavo.compiler.checkpoints import Checkpoint
from octavo.runtime import LLM, CompletionOutput, SamplingParams
from octavo.runtime.sampling.beam_search import BeamSearchParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_TOKENS = 24
EOS = 2
PAD = 3  # a special token that is in no text here, so it does not matter how its logit is edited
COMMA, STOP = 28, 30  # "," and "."
SCORE_TOLERANCE = 1e-3

Options = dict[str, Any]


def chat(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


# The first two may be answered within MAX_TOKENS.
PROMPTS = (
    chat("What is the capital of France?"),
    chat("Answer yes or no: is water wet?"),
    "The opposite of hot is cold. The opposite of up is",
)


@pytest.fixture(scope="module")
def llm(smollm2_engine: Path) -> Iterator[LLM]:
    with LLM(smollm2_engine, num_threads=1, max_num_batched_tokens=32) as opened:
        yield opened


@pytest.fixture(scope="module")
def prompts(smollm2_checkpoint: Checkpoint) -> list[list[int]]:
    tokenizer: Any = smollm2_checkpoint.tokenizer
    return [tokenizer(text).input_ids for text in PROMPTS]


def generate(model: PreTrainedModel, prompts: Sequence[list[int]], options: Options) -> Any:
    """One batch, padded on the left; what `options` leave out is as in an empty config."""
    import torch
    from transformers import GenerationConfig

    settings = {"max_new_tokens": MAX_TOKENS, "eos_token_id": EOS, "pad_token_id": PAD, **options}
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False, return_dict_in_generate=True, output_scores=True, **settings
    )
    width = max(map(len, prompts))
    rows = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    untyped: Any = model
    with torch.inference_mode():
        return untyped.generate(rows, attention_mask=mask, generation_config=config)


# --- beam search ----------------------------------------------------------------------------------

Hypothesis = tuple[list[int], float]  # generated tokens, score


def search_with_transformers(
    model: PreTrainedModel, prompts: Sequence[list[int]], params: BeamSearchParams
) -> list[list[Hypothesis]]:
    """The hypotheses of every prompt, best first."""
    width = params.beam_width
    options = {
        "num_beams": width,
        "num_return_sequences": width,
        "length_penalty": params.length_penalty,
        "early_stopping": params.early_stopping,
        "eos_token_id": [EOS, *(params.stop_token_ids or ())],
    }
    output = generate(model, prompts, options)
    generated = output.sequences[:, max(map(len, prompts)) :]
    lengths = (output.beam_indices >= 0).sum(dim=1)  # -1 behind a sequence's end
    rows = [
        (row[:length].tolist(), float(score))
        for row, length, score in zip(generated, lengths, output.sequences_scores, strict=True)
    ]
    return [rows[start : start + width] for start in range(0, len(rows), width)]


def assert_same_hypotheses(
    found: Sequence[CompletionOutput], expected: Sequence[Hypothesis]
) -> None:
    """The same sequences in the same order; none of the scores compared here tie."""
    assert [one.token_ids for one in found] == [tokens for tokens, _ in expected]
    scores = [score for _, score in expected]
    assert [one.score for one in found] == pytest.approx(scores, abs=SCORE_TOLERANCE)


@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("length_penalty", [0.5, 1.0, 2.0])
def test_beam_search_equals_transformers(
    llm: LLM,
    smollm2_model: PreTrainedModel,
    prompts: list[list[int]],
    length_penalty: float,
    early_stopping: bool,
) -> None:
    """Commas and full stops end hypotheses too, so that there are some of many lengths."""
    params = BeamSearchParams(
        beam_width=4,
        max_tokens=MAX_TOKENS,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        stop_token_ids=(COMMA, STOP),
    )
    expected = search_with_transformers(smollm2_model, prompts, params)
    outputs = llm.beam_search([{"prompt_token_ids": prompt} for prompt in prompts], params)
    for output, hypotheses in zip(outputs, expected, strict=True):
        assert_same_hypotheses(output.outputs, hypotheses)
        for completion in output.outputs:
            last = completion.token_ids[-1]
            assert completion.stop_reason == (last if last in (COMMA, STOP) else None)


def test_beam_search_with_the_models_own_end(
    llm: LLM,
    smollm2_model: PreTrainedModel,
    smollm2_checkpoint: Checkpoint,
    prompts: list[list[int]],
) -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=MAX_TOKENS)
    expected = search_with_transformers(smollm2_model, prompts, params)
    outputs = llm.beam_search([{"prompt_token_ids": prompt} for prompt in prompts], params)
    tokenizer: Any = smollm2_checkpoint.tokenizer
    for output, hypotheses in zip(outputs, expected, strict=True):
        assert_same_hypotheses(output.outputs, hypotheses)
        for completion in output.outputs:
            shown = completion.token_ids
            if completion.finish_reason == "stop":
                assert shown.pop() == EOS
            assert completion.text == tokenizer.decode(
                shown, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
    assert outputs[0].text == "The capital of France is Paris."


# --- edited logits, greedy ------------------------------------------------------------------------


@dataclass(frozen=True)
class Edited:
    """Parameters here, their names in transformers, and whether each prompt's tokens change."""

    params: Options
    options: Options
    changes: tuple[bool, bool, bool]


# Words as one and as several tokens, after a space and not; each would be generated otherwise.
BAD_WORDS = ("Paris", "opposite of", "No, water")
EDITED = {
    "repetition_penalty-1.1": Edited(
        {"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}, (False, True, True)
    ),
    "repetition_penalty-1.3": Edited(
        {"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}, (True, True, True)
    ),
    "min_tokens": Edited({"min_tokens": 20}, {"min_new_tokens": 20}, (True, False, False)),
    "bad_words": Edited({"bad_words": BAD_WORDS}, {"bad_words_ids": BAD_WORDS}, (True, True, True)),
    "all": Edited(
        {"repetition_penalty": 1.1, "min_tokens": 24, "bad_words": BAD_WORDS},
        {"repetition_penalty": 1.1, "min_new_tokens": 24, "bad_words_ids": BAD_WORDS},
        (True, True, True),
    ),
}


@pytest.fixture(scope="module")
def plain(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    """The greedy tokens without any edits."""
    return greedy(llm, prompts, {})


def greedy(llm: LLM, prompts: Sequence[list[int]], options: Options) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, **options)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("edited", EDITED.values(), ids=EDITED)
def test_edited_logits_give_transformers_tokens(
    llm: LLM,
    smollm2_model: PreTrainedModel,
    smollm2_checkpoint: Checkpoint,
    prompts: list[list[int]],
    plain: list[list[int]],
    edited: Edited,
) -> None:
    """S08, D16: the prompt counts for repetition, not for min_tokens."""
    tokenizer: Any = smollm2_checkpoint.tokenizer
    options = dict(edited.options)
    if "bad_words_ids" in options:
        words = [form for word in options["bad_words_ids"] for form in (word, f" {word}")]
        options["bad_words_ids"] = [tokenizer(word).input_ids for word in words]
    found = greedy(llm, prompts, edited.params)
    output = generate(smollm2_model, prompts, options)
    generated = output.sequences[:, max(map(len, prompts)) :].tolist()
    assert found == [[token for token in row if token != PAD] for row in generated]
    assert tuple(a != b for a, b in zip(found, plain, strict=True)) == edited.changes
