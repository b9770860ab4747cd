"""P10: with sliding windows and cached prefixes, no request sees another one's keys and values.

In one engine with a small cache, requests come one after another and side by side. What each gets
is compared with a cold engine that serves it alone, and with transformers.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from octavo.runtime import LLM, RequestOutput, SamplingParams
from tests.backend.tiny_engines import TinyEngine, TinyEngines
from tests.parity.tiny_models import VOCAB_SIZE

WINDOW = 24  # a block and a half
BLOCK_SIZE = 16
NUM_BLOCKS = 10
PARAMS = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=2)


def tokens_of(length: int, seed: int) -> list[int]:
    made: list[int] = np.random.default_rng(seed).integers(3, VOCAB_SIZE, length).tolist()
    return made


FIRST = tokens_of(70, 0)
# The same window's width of tokens before the end, and another text before that.
SAME_END = tokens_of(70 - 40, 1) + FIRST[-40:]
# The same first block, the same first 41 tokens; then they part within FIRST's window.
SAME_BLOCK = FIRST[:16] + tokens_of(40, 2)
SAME_BLOCKS = FIRST[:41] + tokens_of(9, 3)
OTHER = tokens_of(60, 4)


@pytest.fixture(
    scope="module",
    params=[
        ("onnxruntime", "mistral"),  # a window in every layer
        ("torch", "mistral"),
        ("onnxruntime", "gemma2"),  # in every other layer
        ("onnxruntime", "gpt_oss"),  # with sinks
    ],
    ids="-".join,
)
def engine(request: pytest.FixtureRequest, tiny_engines: TinyEngines) -> TinyEngine:
    made = tiny_engines.get(*request.param)
    config = made.model.config
    assert config.sliding_window == WINDOW
    return made


@pytest.fixture
def llm(engine: TinyEngine) -> Iterator[LLM]:
    with opened(engine) as made:
        yield made


def opened(engine: TinyEngine) -> LLM:
    return LLM(engine.path, num_kv_blocks=NUM_BLOCKS, max_num_batched_tokens=32, num_threads=1)


def run(llm: LLM, *prompts: list[int]) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], PARAMS)


def assert_as_alone(engine: TinyEngine, output: RequestOutput) -> None:
    with opened(engine) as cold:
        (wanted,) = run(cold, output.prompt_token_ids)
    (found,), (alone,) = output.outputs, wanted.outputs
    assert found.token_ids == alone.token_ids
    if engine.manifest.backend != "torch":  # whose products depend on the size of the step
        assert found.logprobs == alone.logprobs
    assert found.logprobs is not None
    text = torch.tensor([output.prompt_token_ids + found.token_ids])
    with torch.no_grad():
        expected = torch.log_softmax(engine.model(text).logits[0].double(), -1)
    first = len(output.prompt_token_ids) - 1
    for row, position in zip(expected[first:-1], found.logprobs, strict=True):
        for token_id, entry in position.items():
            assert entry.logprob == pytest.approx(float(row[token_id]), abs=1e-3)


def cached(outputs: list[RequestOutput]) -> list[int]:
    return [output.num_cached_tokens for output in outputs]


def test_p10_one_after_another(engine: TinyEngine, llm: LLM) -> None:
    """Whole beginnings are reused, and never just the tokens that a window shows."""
    outputs = [run(llm, prompt)[0] for prompt in (FIRST, SAME_END, SAME_BLOCK, SAME_BLOCKS, FIRST)]
    assert cached(outputs)[:3] == [0, 0, BLOCK_SIZE]
    assert cached(outputs)[3] in (BLOCK_SIZE, 2 * BLOCK_SIZE)  # some may be evicted
    for output in outputs:
        assert_as_alone(engine, output)


def test_p10_a_full_hit_longer_than_the_window(engine: TinyEngine, llm: LLM) -> None:
    outputs = [run(llm, FIRST)[0] for _ in range(2)]
    assert cached(outputs) == [0, len(FIRST) - 1]
    assert outputs[1].outputs == outputs[0].outputs or engine.manifest.backend == "torch"
    assert_as_alone(engine, outputs[1])


def test_p10_side_by_side(engine: TinyEngine, llm: LLM) -> None:
    """In chunks, with blocks that go from one request to the next, and preemption."""
    run(llm, FIRST)
    outputs = run(llm, SAME_BLOCKS, OTHER, SAME_END, SAME_BLOCK)
    assert outputs[0].num_cached_tokens == 41  # two blocks, and of a third what they share
    assert llm.metrics()["prefix_cache_evictions"] > 0
    assert llm.metrics()["num_preemptions"] > 0
    for output in outputs:
        assert_as_alone(engine, output)
