"""Cases of other systems' bug reports about chunks, preemption and batches, by their ids.

K02 is in `test_runtime_generation_logprobs.py`; more of K01, K03, K04, K06, K07 and K10 in
`test_runtime_engine.py`, with a real model's bits in `tests/e2e/test_bitwise.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.runtime.llm_engine import LLMEngine
from octavo.runtime.sampling.sampling_params import RequestOutputKind
from tests.unit.llm_engines import complete, greedy, ids, letters, run
from tests.unit.runtime_bundles import write_text_engine
from tests.unit.runtime_harness import Harness, alone, random_tokens


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_engine(tmp_path_factory.mktemp("chunk-cases") / "engine")


def test_k01_chunks_that_end_with_blocks_are_fed_once() -> None:
    prompt = random_tokens(12)
    harness = Harness(block_size=4, max_num_batched_tokens=4)
    request = harness.add(prompt, max_tokens=5)
    harness.run()
    assert request.output_token_ids == alone(prompt, 5)
    fed = [step.token_ids.tolist() for step in harness.steps]
    assert fed == [prompt[:4], prompt[4:8], prompt[8:], *([t] for t in alone(prompt, 4))]
    assert [len(step.logits_indices) for step in harness.steps] == [0, 0, 1, 1, 1, 1, 1]


def test_k03_k04_the_size_of_chunks_changes_nothing(bundle: Path) -> None:
    """Neither tokens nor log-probabilities, bit for bit."""
    prompt = random_tokens(23)
    params = letters(n=2, max_tokens=5, logprobs=2, prompt_logprobs=2)
    whole = complete(LLMEngine(bundle), prompt, params)
    for budget in range(1, 24):
        chunked = complete(LLMEngine(bundle, max_num_batched_tokens=budget), prompt, params)
        assert chunked.outputs == whole.outputs
        assert chunked.prompt_logprobs == whole.prompt_logprobs


@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA])
def test_k05_chunks_before_the_last_show_nothing(bundle: Path, kind: RequestOutputKind) -> None:
    engine = LLMEngine(bundle, max_num_batched_tokens=5)
    engine.add_request("chunks", ids(random_tokens(17)), greedy(max_tokens=3, output_kind=kind))
    outputs = [engine.step() for _ in range(6)]
    assert outputs[:3] == [[], [], []]
    (first,) = outputs[3]
    assert len(first.outputs[0].token_ids) == 1
    assert first.outputs[0].token_ids[0] >= 0
    assert [output.finished for step in outputs[3:] for output in step] == [False, False, True]
    assert not engine.has_unfinished_requests


def test_k06_k07_a_preempted_stream_misses_and_repeats_nothing(bundle: Path) -> None:
    prompts = [random_tokens(6, seed=seed) for seed in range(3)]
    roomy = LLMEngine(bundle)
    cold = [complete(roomy, p, letters(max_tokens=18, seed=3, logprobs=1)) for p in prompts]
    engine = LLMEngine(bundle, num_kv_blocks=8, enable_prefix_caching=False)
    params = letters(max_tokens=18, seed=3, logprobs=1, output_kind=RequestOutputKind.DELTA)
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), ids(prompt), params)
    outputs = run(engine)
    assert engine.metrics()["num_preemptions"] >= 1
    for index, expected in enumerate(cold):
        parts = [o.outputs[0] for o in outputs if o.request_id == str(index)]
        assert len(parts) == 18
        assert [part.token_ids[0] for part in parts] == expected.outputs[0].token_ids
        assert "".join(part.text for part in parts) == expected.text
        assert [row for p in parts for row in p.logprobs or ()] == expected.outputs[0].logprobs


def test_k07_a_resumed_request_is_fed_its_prompt_and_its_output() -> None:
    prompt = random_tokens(5)
    harness = Harness(block_size=4, enable_prefix_caching=False)
    request = harness.add(prompt, max_tokens=6)
    for _ in range(3):
        harness.step()
    scheduler = harness.engine.scheduler
    scheduler._preempt(request)
    harness.check()
    harness.step()
    expected = alone(prompt, 6)
    assert harness.steps[-1].token_ids.tolist() == prompt + expected[:3]
    assert harness.steps[-1].positions.tolist() == list(range(8))
    assert len(harness.steps[-1].logits_indices) == 1
    harness.run()
    assert request.output_token_ids == expected


def test_k10_requests_that_need_the_whole_pool_take_turns() -> None:
    """Each of six may need every block; 4 of them begin together."""
    harness = Harness(num_kv_blocks=12, block_size=2, enable_prefix_caching=False)
    prompts = [random_tokens(5, seed=seed) for seed in range(6)]
    requests = [harness.add(prompt, max_tokens=20) for prompt in prompts]
    harness.run()
    assert [r.output_token_ids for r in requests] == [alone(prompt, 20) for prompt in prompts]
    # One after the other it takes 6 x 20 steps, and never so many more that work is lost.
    assert len(harness.steps) <= 120
    fed = sum(len(step.token_ids) for step in harness.steps)
    assert fed <= 2 * 6 * 24


def test_k11_a_batch_of_five_equals_five_batches_of_one() -> None:
    prompts = [random_tokens(3 + 5 * seed, seed=seed) for seed in range(5)]
    harness = Harness()
    params: dict[str, Any] = {"temperature": 1.0, "logprobs": 2, "seed": 1}
    requests = [harness.add(prompt, 9, **params) for prompt in prompts]
    harness.run()
    for prompt, batched in zip(prompts, requests, strict=True):
        single = Harness()
        request = single.add(prompt, 9, **params)
        single.run()
        assert batched.output_token_ids == request.output_token_ids
        assert [row.logprob for row in batched.logprobs] == [r.logprob for r in request.logprobs]


def test_k12_every_token_is_fed_with_its_own_position() -> None:
    """Counted before the step's tokens are added: in chunks, decodes, batches and after a hit."""
    prompt = random_tokens(21)
    harness = Harness(block_size=4, max_num_batched_tokens=8)
    harness.add(prompt, max_tokens=4)
    harness.run()
    positions = [step.positions.tolist() for step in harness.steps]
    assert positions == [list(range(8)), list(range(8, 16)), list(range(16, 21)), [21], [22], [23]]
    harness.steps.clear()
    harness.add(prompt, max_tokens=3)
    harness.add(prompt[:6], max_tokens=3)
    harness.run()
    # 20 of 21 and 5 of 6 tokens are found.
    positions = [step.positions.tolist() for step in harness.steps]
    assert positions == [[20, 5], [21, 6], [22, 7]]
