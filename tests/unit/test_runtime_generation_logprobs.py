"""Log-probabilities of outputs and prompts: whole, of the raw logits, whatever the schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.backends.base import StepInputs
from octavo.backends.manifest import Limits
from octavo.graphs.errors import BackendError
from octavo.runtime.llm_engine import LLMEngine
from octavo.runtime.outputs import PositionLogprobs
from octavo.runtime.sampling.sampling_params import RequestOutputKind
from tests.unit.llm_engines import complete, greedy, ids, letters, null_logprobs, run
from tests.unit.runtime_bundles import VOCAB_SIZE, write_text_engine
from tests.unit.runtime_harness import random_tokens

PROMPT = random_tokens(30)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    limits = Limits(max_model_len=256, max_num_seqs=4, max_num_batched_tokens=256, block_size=4)
    return write_text_engine(tmp_path_factory.mktemp("logprobs") / "engine", limits=limits)


@pytest.fixture
def engine(bundle: Path) -> Iterator[LLMEngine]:
    loaded = LLMEngine(bundle)
    yield loaded
    loaded.close()


def check_position(
    position: PositionLogprobs, context: Sequence[int], token_id: int, num_logprobs: int
) -> None:
    """The token of the position and the likeliest ones, by the float64 log-softmax."""
    expected = null_logprobs(context)
    likeliest = np.argsort(-expected, kind="stable")[:num_logprobs].tolist()
    assert list(position) == [token_id, *(top for top in likeliest if top != token_id)]
    for found_id, found in position.items():
        assert found.logprob == pytest.approx(expected[found_id], abs=1e-6)
        assert found.rank == 1 + int((expected > expected[found_id]).sum())


def check_prompt(
    positions: list[PositionLogprobs | None] | None, prompt: Sequence[int], num_logprobs: int
) -> None:
    assert positions is not None
    assert len(positions) == len(prompt)
    assert positions[0] is None
    for index, position in enumerate(positions[1:], start=1):
        assert position is not None
        check_position(position, prompt[:index], prompt[index], num_logprobs)


@pytest.mark.parametrize("num_logprobs", [0, 1, 3, -1])
def test_logprobs_hold_the_chosen_token_and_the_likeliest(
    engine: LLMEngine, num_logprobs: int
) -> None:
    params = letters(max_tokens=10, logprobs=num_logprobs, temperature=2.0)
    (completion,) = complete(engine, PROMPT, params).outputs
    assert completion.logprobs is not None
    assert len(completion.logprobs) == 10
    count = VOCAB_SIZE if num_logprobs == -1 else num_logprobs
    tokens = list(PROMPT)
    for token_id, position in zip(completion.token_ids, completion.logprobs, strict=True):
        check_position(position, tokens, token_id, count)
        tokens.append(token_id)
    chosen = [p[t].logprob for p, t in zip(completion.logprobs, completion.token_ids, strict=True)]
    assert completion.cumulative_logprob == pytest.approx(sum(chosen), abs=1e-9)


def test_logprobs_are_of_the_raw_logits(engine: LLMEngine) -> None:
    """Penalties, biases and banned tokens change the choice and not what is reported."""
    edits: dict[str, Any] = {
        "presence_penalty": 1.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.7,
        "logit_bias": {65: 30.0, 66: 30.0, 67: 29.0},
        "temperature": 0.3,
        "top_k": 4,
    }
    (completion,) = complete(engine, PROMPT, letters(max_tokens=12, logprobs=2, **edits)).outputs
    assert set(completion.token_ids) <= {65, 66, 67}
    tokens = list(PROMPT)
    for token_id, position in zip(completion.token_ids, completion.logprobs or (), strict=True):
        check_position(position, tokens, token_id, 2)
        tokens.append(token_id)


def test_each_completion_has_its_own_logprobs(engine: LLMEngine) -> None:
    for completion in complete(engine, PROMPT, letters(n=3, max_tokens=5, logprobs=1)).outputs:
        tokens = list(PROMPT)
        for token_id, position in zip(completion.token_ids, completion.logprobs or (), strict=True):
            check_position(position, tokens, token_id, 1)
            tokens.append(token_id)


@pytest.mark.parametrize("num_logprobs", [0, 2, -1])
@pytest.mark.parametrize("budget", [1, 2, 7, 30])
def test_k02_prompt_logprobs_are_whole_with_chunks_of_any_size(
    bundle: Path, budget: int, num_logprobs: int
) -> None:
    engine = LLMEngine(bundle, max_num_batched_tokens=budget)
    params = greedy(max_tokens=2, prompt_logprobs=num_logprobs)
    output = complete(engine, PROMPT, params)
    check_prompt(output.prompt_logprobs, PROMPT, VOCAB_SIZE if num_logprobs == -1 else num_logprobs)


def test_a_prompt_of_one_token_has_one_position(engine: LLMEngine) -> None:
    output = complete(engine, [7], greedy(max_tokens=2, prompt_logprobs=1))
    assert output.prompt_logprobs == [None]


def test_prompt_logprobs_are_not_taken_from_the_prefix_cache(engine: LLMEngine) -> None:
    """What was cached without logprobs is computed for them, and then serves others again."""
    first = complete(engine, PROMPT, greedy(max_tokens=2))
    told = complete(engine, PROMPT, greedy(max_tokens=2, prompt_logprobs=1))
    later = complete(engine, PROMPT, greedy(max_tokens=2))
    assert [o.num_cached_tokens for o in (first, told, later)] == [0, 0, 28]
    check_prompt(told.prompt_logprobs, PROMPT, 1)
    assert first.outputs == told.outputs == later.outputs
    assert later.prompt_logprobs is None


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_prompt_logprobs_survive_preemption(bundle: Path, enable_prefix_caching: bool) -> None:
    """In the middle of the prompt, with a request of more importance; and after it, for blocks."""
    engine = LLMEngine(
        bundle,
        max_num_batched_tokens=9,
        max_num_seqs=1,
        scheduling_policy="priority",
        enable_prefix_caching=enable_prefix_caching,
    )
    params = greedy(max_tokens=4, prompt_logprobs=2, logprobs=2)
    cold = complete(engine, PROMPT, params)
    engine.reset_prefix_cache()
    engine.add_request("preempted", ids(PROMPT), params, priority=5)
    outputs = []
    for step in range(100):
        if step in (1, 4, 6, 11):
            engine.add_request(f"important {step}", ids([step, 1]), greedy(max_tokens=1))
        outputs += engine.step()
        if not engine.has_unfinished_requests:
            break
    (output,) = [one for one in outputs if one.request_id == "preempted"]
    assert output.metrics.num_preemptions >= 3
    check_prompt(output.prompt_logprobs, PROMPT, 2)
    assert output.prompt_logprobs == cold.prompt_logprobs
    assert output.outputs == cold.outputs


def test_logits_of_a_long_prompt_are_computed_in_pieces(engine: LLMEngine) -> None:
    """A row is as long as the vocabulary; 64 rows at once, whatever the step could take."""
    executable: Any = engine.engine._executable
    execute = executable.run
    rows = []

    def recording(inputs: StepInputs) -> object:
        rows.append(len(inputs.logits_indices))
        return execute(inputs)

    executable.run = recording
    prompt = random_tokens(150)
    output = complete(engine, prompt, greedy(max_tokens=3, prompt_logprobs=0))
    check_prompt(output.prompt_logprobs, prompt, 0)
    assert rows == [64, 64, 22, 1, 1]


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
def test_prompt_logprobs_come_with_the_first_token(
    engine: LLMEngine, kind: RequestOutputKind
) -> None:
    """In every output, for a stream of deltas in the first one only; for several completions."""
    params = letters(n=2, max_tokens=4, prompt_logprobs=1, output_kind=kind)
    engine.add_request("stream", ids(PROMPT), params)
    first, *rest = run(engine)
    check_prompt(first.prompt_logprobs, PROMPT, 1)
    expected = None if kind is RequestOutputKind.DELTA else first.prompt_logprobs
    assert [output.prompt_logprobs for output in rest] == [expected] * 3


@pytest.mark.parametrize(
    "params", [{"prompt_logprobs": 2}, {"logprobs": 2}, {"prompt_logprobs": 0}]
)
def test_logits_that_are_no_numbers_fail_their_request_alone(
    engine: LLMEngine, params: dict[str, Any]
) -> None:
    executable: Any = engine.engine._executable
    execute = executable.run

    def poisoned(inputs: StepInputs) -> Any:
        outputs = execute(inputs)
        num_rows = len(inputs.logits_indices) - 1
        if num_rows:
            outputs.logits[:num_rows] = np.nan
        return outputs

    executable.run = poisoned
    engine.add_request("poisoned", ids(PROMPT), greedy(max_tokens=3, **params))
    engine.add_request("well", ids([5, 6]), greedy(max_tokens=3, logprobs=1))
    outputs = {output.request_id: output for output in run(engine)}
    assert isinstance(outputs["poisoned"].error, BackendError)
    assert outputs["well"].error is None
    assert len(outputs["well"].outputs[0].token_ids) == 3
