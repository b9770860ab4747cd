"""Sampled tokens, texts and log-probabilities are the same, bit for bit, whatever the schedule.

Outputs are compared with those of the same request alone: its prompt in one piece, no cached
prefixes, one thread. A Python float equals another only if its bits do (none of them is a zero).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from octavo.compiler.checkpoints import Checkpoint
from octavo.runtime import LLM, RequestOutput, SamplingParams
from octavo.runtime.llm_engine import LLMEngine
from octavo.runtime.outputs import PositionLogprobs
from octavo.runtime.prompts import Prompt
from tests.e2e.conftest import Engines
from tests.e2e.prompts import LONG, PROMPTS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BLOCK_SIZE = 16
LOGPROB_TOLERANCE = 1e-3

COMPLETIONS = SamplingParams(
    n=4,
    temperature=0.9,
    top_p=0.95,
    min_p=0.02,
    repetition_penalty=1.1,
    presence_penalty=0.3,
    seed=7,
    max_tokens=20,
    ignore_eos=True,
    logprobs=3,
)
# Different ways to sample for whoever shares the batch.
COMPANY = [
    SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=1.3, top_k=40, seed=1, max_tokens=30, n=2, logprobs=0),
    SamplingParams(temperature=0.7, frequency_penalty=0.5, seed=2, max_tokens=5, prompt_logprobs=1),
    SamplingParams(temperature=1.0, min_p=0.1, seed=7, max_tokens=17, logit_bias={30: 2.0}),
]


@pytest.fixture(scope="module", params=["float32", "int8"])
def engine(request: pytest.FixtureRequest, smollm2_engines: Engines) -> Path:
    return smollm2_engines[request.param]


@pytest.fixture(scope="module")
def prompt(smollm2_checkpoint: Checkpoint) -> Prompt:
    return first_tokens(smollm2_checkpoint, 38)  # of three blocks, the last not full


@pytest.fixture(scope="module")
def long_prompt(smollm2_checkpoint: Checkpoint) -> Prompt:
    return first_tokens(smollm2_checkpoint, 90)


def first_tokens(checkpoint: Checkpoint, count: int) -> Prompt:
    tokenizer: Any = checkpoint.tokenizer
    return {"prompt_token_ids": tokenizer(LONG).input_ids[:count]}


@pytest.fixture(scope="module")
def reference(engine: Path) -> Iterator[LLM]:
    with LLM(engine, num_threads=1, enable_prefix_caching=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(reference: LLM, prompt: Prompt) -> RequestOutput:
    (output,) = reference.generate(prompt, COMPLETIONS)
    texts = {completion.text for completion in output.outputs}
    assert len(texts) == COMPLETIONS.n  # otherwise there is little to compare
    return output


def assert_equal(found: RequestOutput, wanted: RequestOutput) -> None:
    """Tokens, texts, ends and every log-probability of every completion and of the prompt."""
    for one, other in zip(found.outputs, wanted.outputs, strict=True):
        assert one == other
    assert found.prompt_logprobs == wanted.prompt_logprobs


# --- completions ----------------------------------------------------------------------------------


def test_one_completion_is_the_first_of_several(
    reference: LLM, prompt: Prompt, alone: RequestOutput
) -> None:
    (output,) = reference.generate(prompt, replace(COMPLETIONS, n=1))
    assert output.outputs == alone.outputs[:1]


def test_on_two_threads_and_again_with_a_prefix_hit(
    engine: Path, prompt: Prompt, alone: RequestOutput
) -> None:
    """P01, P02: the second time all but the prompt's last token is cached."""
    with LLM(engine, num_threads=2) as llm:
        outputs = [llm.generate(prompt, COMPLETIONS)[0] for _ in range(2)]
    assert [output.num_cached_tokens for output in outputs] == [0, 37]
    for output in outputs:
        assert_equal(output, alone)


def test_beside_eight_others(engine: Path, prompt: Prompt, alone: RequestOutput) -> None:
    """K11: in the middle of a batch, of which some ends sooner and some goes on longer."""
    prompts: list[Prompt] = [*PROMPTS[:5], prompt, *PROMPTS[10:13]]
    company = list(itertools.islice(itertools.cycle(COMPANY), 8))
    with LLM(engine, num_threads=1) as llm:
        outputs = llm.generate(prompts, [*company[:5], COMPLETIONS, *company[5:]])
    assert_equal(outputs[5], alone)


@pytest.mark.parametrize("budget", [3, 16])
def test_chunked(engine: Path, prompt: Prompt, alone: RequestOutput, budget: int) -> None:
    """K03, K04: with 3 tokens a step the four completions cannot even all take part in one."""
    with LLM(engine, num_threads=1, max_num_batched_tokens=budget) as llm:
        (output,) = llm.generate(prompt, COMPLETIONS)
    assert_equal(output, alone)


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_preempted(
    engine: Path, prompt: Prompt, alone: RequestOutput, enable_prefix_caching: bool
) -> None:
    """K06, K07: four completions need 10 blocks, 2 of them shared; there are 7."""
    with LLM(
        engine, num_threads=1, num_kv_blocks=7, enable_prefix_caching=enable_prefix_caching
    ) as llm:
        (output,) = llm.generate(prompt, COMPLETIONS)
        assert llm.metrics()["num_preemptions"] > 0
        assert output.metrics.num_preemptions == llm.metrics()["num_preemptions"]
    assert_equal(output, alone)


def test_preempted_beside_others_in_chunks(
    engine: Path, prompt: Prompt, alone: RequestOutput
) -> None:
    """Everything at once, with a priority that lets a late request take the place of others."""
    prompts: list[Prompt] = [prompt, *PROMPTS[:3], prompt]
    with LLM(
        engine,
        num_threads=1,
        num_kv_blocks=11,
        max_num_batched_tokens=12,
        max_num_partial_prefills=2,
        scheduling_policy="priority",
    ) as llm:
        outputs = llm.generate(
            prompts, [COMPLETIONS, *COMPANY[:3], COMPLETIONS], priority=[1, 2, 1, 0, 0]
        )
        assert llm.metrics()["num_preemptions"] > 0
    for output in (outputs[0], outputs[4]):
        assert_equal(output, alone)


# --- seeds ----------------------------------------------------------------------------------------

SEEDED = [
    SamplingParams(temperature=0.7, top_p=0.9, seed=11, max_tokens=12, logprobs=1),
    SamplingParams(temperature=1.5, min_p=0.1, seed=12, max_tokens=12, logprobs=1),
    SamplingParams(
        temperature=1.0,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.2,
        seed=13,
        max_tokens=12,
        logprobs=1,
    ),
    SamplingParams(
        temperature=1.2,
        top_p=0.95,
        min_p=0.02,
        top_k=50,
        frequency_penalty=-0.4,
        repetition_penalty=0.9,
        seed=14,
        max_tokens=12,
        logprobs=1,
    ),
]


def test_equal_seeds_give_equal_texts_alone_and_in_a_batch_of_32(
    engine: Path, reference: LLM
) -> None:
    """Each of four requests is in the batch twice; of the others each has a seed of its own."""
    prompts = PROMPTS[3:7]
    wanted = [
        reference.generate(prompt, params)[0]
        for prompt, params in zip(prompts, SEEDED, strict=True)
    ]
    others = [replace(params, seed=100 + index) for index in range(6) for params in SEEDED]
    batch = [*others[:13], *SEEDED, *others[13:20], *SEEDED, *others[20:]]
    prompts_of_others = [PROMPTS[3 + index % 4] for index in range(24)]
    texts: list[Prompt] = [
        *prompts_of_others[:13], *prompts, *prompts_of_others[13:20], *prompts,
        *prompts_of_others[20:],
    ]  # fmt: skip
    assert len(batch) == 32
    with LLM(engine, num_threads=1) as llm:
        outputs = llm.generate(texts, batch)
    for start in (13, 24):
        for found, one in zip(outputs[start : start + 4], wanted, strict=True):
            assert_equal(found, one)
    # With other seeds the same prompts and parameters go other ways.
    for index, one in enumerate(wanted):
        assert {output.text for output in outputs[index:13:4]} - {one.text}


# --- log-probabilities of the prompt --------------------------------------------------------------

WITH_PROMPT = SamplingParams(
    temperature=1.0, seed=3, n=2, max_tokens=4, ignore_eos=True, prompt_logprobs=4, logprobs=2
)


@pytest.fixture(scope="module")
def prompt_alone(reference: LLM, long_prompt: Prompt) -> RequestOutput:
    (output,) = reference.generate(long_prompt, WITH_PROMPT)
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids) == 90
    return output


@pytest.mark.parametrize("budget", [3, 16, 37])
def test_prompt_logprobs_in_chunks(
    engine: Path, long_prompt: Prompt, prompt_alone: RequestOutput, budget: int
) -> None:
    """K02: those of all chunks, each once."""
    with LLM(engine, num_threads=1, max_num_batched_tokens=budget) as llm:
        (output,) = llm.generate(long_prompt, WITH_PROMPT)
    assert_equal(output, prompt_alone)


def test_prompt_logprobs_of_a_cached_prompt(
    engine: Path, long_prompt: Prompt, prompt_alone: RequestOutput
) -> None:
    """K02, P01: whether it was cached with log-probabilities or without, alone or in a batch."""
    without = replace(WITH_PROMPT, prompt_logprobs=None)
    with LLM(engine, num_threads=1) as llm:
        llm.generate(long_prompt, without)
        first = llm.generate(long_prompt, WITH_PROMPT)
        both = llm.generate([long_prompt, long_prompt], [without, WITH_PROMPT])
    assert_equal(first[0], prompt_alone)
    assert_equal(both[1], prompt_alone)
    assert both[0].num_cached_tokens == 5 * BLOCK_SIZE
    assert both[0].prompt_logprobs is None
    for found, wanted in zip(both[0].outputs, prompt_alone.outputs, strict=True):
        assert found == wanted


def test_prompt_logprobs_of_a_preempted_prompt(
    engine: Path, long_prompt: Prompt, prompt_alone: RequestOutput
) -> None:
    """K02, K06: an urgent request takes its blocks when its prompt is half computed."""
    finished: dict[str, RequestOutput] = {}
    with closing(
        LLMEngine(
            engine,
            num_threads=1,
            num_kv_blocks=7,
            max_num_batched_tokens=8,
            scheduling_policy="priority",
        )
    ) as llm_engine:
        llm_engine.add_request("preempted", long_prompt, WITH_PROMPT, priority=1)
        for _ in range(6):
            assert llm_engine.step() == []  # 48 of 90 tokens
        llm_engine.add_request("urgent", PROMPTS[13] * 3, COMPANY[1], priority=0)
        assert llm_engine.step() == []
        assert llm_engine.metrics()["num_preemptions"] == 1
        while llm_engine.has_unfinished_requests:
            finished |= {output.request_id: output for output in llm_engine.step()}
    assert finished["preempted"].metrics.num_preemptions >= 1
    assert_equal(finished["preempted"], prompt_alone)


def log_softmax(model: PreTrainedModel, token_ids: list[int]) -> Any:
    """[len, V] of transformers, in float64."""
    import torch

    with torch.inference_mode():
        logits = model(torch.tensor([token_ids])).logits[0]
    return torch.log_softmax(logits.double(), -1).numpy()


def assert_close_to(expected: Any, token_id: int, position: PositionLogprobs) -> None:
    """Values and ranks of one position against a row [V] of transformers."""
    assert next(iter(position)) == token_id  # the position's own token comes first
    for key, entry in position.items():
        assert entry.logprob == pytest.approx(float(expected[key]), abs=LOGPROB_TOLERANCE)
        # Tokens of nearly the same probability may stand in either order.
        surely_likelier = int((expected > expected[key] + LOGPROB_TOLERANCE).sum())
        perhaps_likelier = int((expected > expected[key] - LOGPROB_TOLERANCE).sum())
        assert surely_likelier < entry.rank <= perhaps_likelier


def test_logprobs_are_those_of_transformers(
    smollm2_engine: Path, smollm2_model: PreTrainedModel, long_prompt: Prompt
) -> None:
    """S09: of prompt and output, in chunks; the raw ones, whatever was done before sampling."""
    params = replace(WITH_PROMPT, repetition_penalty=1.2, top_p=0.9, temperature=0.6)
    with LLM(smollm2_engine, num_threads=1, max_num_batched_tokens=48) as llm:
        (output,) = llm.generate(long_prompt, params)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    tokens = output.prompt_token_ids
    for completion in output.outputs:
        expected = log_softmax(smollm2_model, tokens + completion.token_ids)
        assert completion.logprobs is not None
        positions = [*output.prompt_logprobs[1:], *completion.logprobs]
        following = [*tokens[1:], *completion.token_ids]
        counts = [4] * (len(tokens) - 1) + [2] * len(completion.token_ids)
        rows = zip(expected[:-1], following, positions, counts, strict=True)
        for row, token_id, position, count in rows:
            assert position is not None
            assert len(position) in (count, count + 1)  # the token may be one of the likeliest
            assert_close_to(row, token_id, position)
        summed = sum(
            row[token]
            for row, token in zip(expected[len(tokens) - 1 : -1], completion.token_ids, strict=True)
        )
        assert completion.cumulative_logprob == pytest.approx(float(summed), abs=4e-3)
