"""Every backend's real model against transformers: 64 greedy tokens of 20 prompts, and logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from octavo.backends import registry
from octavo.backends.base import LoadOptions
from octavo.backends.bundle import read_manifest
from octavo.compiler import BuildConfig, build_engine
from octavo.compiler.checkpoints import Checkpoint
from octavo.runtime import LLM, RequestOutput, SamplingParams
from tests.backend.steps import Sequence as PagedSequence
from tests.backend.steps import run_step
from tests.e2e.conftest import SMOLLM2
from tests.e2e.prompts import LONG, ONE_TOKEN, PROMPTS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_TOKENS = 64
TOKEN_BUDGET = 96
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
# Two best logits of the reference that lie closer are a tie: either token may come first.
TIE = 1e-3
LOGITS_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Expected:
    """What transformers makes of a prompt, and by how much each token won."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    margins: list[float]


def generate_with_transformers(
    model: PreTrainedModel, prompts: Sequence[list[int]]
) -> list[Expected]:
    """One batch, padded on the left. Rows that have ended go on with padding, which is cut off."""
    import torch

    untyped: Any = model
    end = untyped.generation_config.eos_token_id
    width = max(map(len, prompts))
    rows = torch.tensor([[end] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.inference_mode():
        output = untyped.generate(
            rows,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.stack([logits.topk(2).values for logits in output.logits], 1)  # [B, n, 2]
    expected = []
    for prompt, row, pair in zip(prompts, output.sequences[:, width:].tolist(), best, strict=True):
        tokens = row[: row.index(end) + 1] if end in row else row
        expected.append(Expected(prompt, tokens, (pair[:, 0] - pair[:, 1]).tolist()))
    return expected


@pytest.fixture(scope="module")
def expected(smollm2_checkpoint: Checkpoint, smollm2_model: PreTrainedModel) -> list[Expected]:
    tokenizer = smollm2_checkpoint.tokenizer
    assert tokenizer is not None
    prompts = [list(tokenizer(text).input_ids) for text in PROMPTS]
    *short, long = prompts
    generated = generate_with_transformers(smollm2_model, short)
    return [*generated, *generate_with_transformers(smollm2_model, [long])]


@pytest.fixture(scope="module", params=["onnxruntime", "inductor", "torch"])
def engine(
    request: pytest.FixtureRequest, smollm2_engine: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    if request.param == "onnxruntime":
        return smollm2_engine
    config = BuildConfig(
        model=SMOLLM2,
        output=tmp_path_factory.mktemp("engines") / request.param,
        backend=request.param,
        use_cache=False,
    )
    return build_engine(config).path


@pytest.fixture(scope="module")
def llm(engine: Path) -> Iterator[LLM]:
    with LLM(engine, max_num_batched_tokens=TOKEN_BUDGET, num_threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def outputs(llm: LLM) -> list[RequestOutput]:
    """All prompts in one call: continuous batching in steps of at most TOKEN_BUDGET tokens."""
    return llm.generate(list(PROMPTS), GREEDY)


def assert_same_tokens(found: Sequence[int], expected: Expected) -> None:
    """Token for token, up to the first difference that is a tie of the reference."""
    for index, (token, wanted) in enumerate(zip(found, expected.token_ids, strict=False)):
        if token != wanted:
            margin = expected.margins[index]
            assert margin <= TIE, f"token {index} is {token}, not {wanted}, which won by {margin}"
            return
    assert len(found) == len(expected.token_ids)


def test_the_prompts_are_what_they_are_meant_to_be(outputs: list[RequestOutput]) -> None:
    lengths = {str(output.prompt): len(output.prompt_token_ids) for output in outputs}
    assert len(lengths) == 20
    assert lengths[ONE_TOKEN] == 1
    assert lengths[LONG] > TOKEN_BUDGET


@pytest.mark.parametrize("index", range(len(PROMPTS)))
def test_greedy_tokens_equal_transformers(
    outputs: list[RequestOutput], expected: list[Expected], index: int
) -> None:
    """K04, K11, D17: batched, chunked and with the same token ids for the same text."""
    output, wanted = outputs[index], expected[index]
    (completion,) = output.outputs
    assert output.prompt_token_ids == wanted.prompt_token_ids
    assert_same_tokens(completion.token_ids, wanted)
    reason = "length" if len(completion.token_ids) == MAX_TOKENS else "stop"
    assert completion.finish_reason == reason


@pytest.mark.parametrize("prompt", [PROMPTS[10], ONE_TOKEN, LONG])
def test_a_prompt_alone_gives_the_same(
    engine: Path, outputs: list[RequestOutput], expected: list[Expected], prompt: str
) -> None:
    index = PROMPTS.index(prompt)
    with LLM(engine) as llm:
        (alone,) = llm.generate(prompt, GREEDY)
    assert_same_tokens(alone.outputs[0].token_ids, expected[index])
    if read_manifest(engine).backend == "torch":
        return  # its products of matrices depend on the size of the step
    batched = outputs[index]
    assert alone.outputs[0].token_ids == batched.outputs[0].token_ids
    assert alone.text == batched.text


def test_the_texts_are_the_tokenizers(
    outputs: list[RequestOutput], smollm2_checkpoint: Checkpoint
) -> None:
    tokenizer: Any = smollm2_checkpoint.tokenizer
    for output in outputs:
        (completion,) = output.outputs
        stopped = completion.finish_reason == "stop"
        shown = completion.token_ids[:-1] if stopped else completion.token_ids
        wanted = tokenizer.decode(
            shown, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert completion.text == wanted


def test_logits_equal_transformers(
    engine: Path, smollm2_model: PreTrainedModel, outputs: list[RequestOutput]
) -> None:
    """Every position of four prompts and their answers, all in one step on the bare backend."""
    import torch

    chosen = [outputs[PROMPTS.index(prompt)] for prompt in (*PROMPTS[:2], PROMPTS[15], LONG)]
    texts = [
        np.array(output.prompt_token_ids + output.outputs[0].token_ids, np.int32)
        for output in chosen
    ]
    manifest = read_manifest(engine)
    executable = registry.get(manifest.backend).load(engine, manifest, LoadOptions(num_threads=1))
    executable.allocate_kv_cache(128)
    blocks = np.random.default_rng(0).permutation(128).reshape(len(texts), -1)
    parts = [
        (PagedSequence(tokens, row.tolist()), 0, len(tokens))
        for tokens, row in zip(texts, blocks, strict=True)
    ]
    found = run_step(executable, parts)
    executable.close()
    for tokens, logits in zip(texts, found, strict=True):
        with torch.inference_mode():
            wanted = smollm2_model(torch.from_numpy(tokens).long()[None]).logits[0].numpy()
        np.testing.assert_allclose(logits, wanted, rtol=0, atol=LOGITS_TOLERANCE)
