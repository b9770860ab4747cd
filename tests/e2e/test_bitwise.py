"""The same bits whatever the schedule, on the real engines through the real runtime.

Each position's logits are compared with those of its prompt alone, in one piece, on one thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.backends.base import Float32Array
from octavo.compiler.checkpoints import Checkpoint
from octavo.runtime import RequestOutput, SamplingParams
from tests.e2e.conftest import PRECISIONS, Engines
from tests.e2e.prompts import LONG
from tests.e2e.recording import History, RecordingExecutable, prefixes, recorded_llm

FEW = 3
MANY = 40
Baseline = Mapping[History, Float32Array]


@pytest.fixture(scope="module")
def prompts(smollm2_checkpoint: Checkpoint) -> list[list[int]]:
    """21, 22, 38 and 70 tokens; the last two have more than two blocks in common."""
    tokenizer: Any = smollm2_checkpoint.tokenizer
    text: list[int] = tokenizer(LONG).input_ids
    code: list[int] = tokenizer("def add(a, b):\n    return a + b\n\n" * 4).input_ids
    made = [text[90:111], code[:22], text[:35] + code[:3], text[:70]]
    assert [len(prompt) for prompt in made] == [21, 22, 38, 70]
    return made


@pytest.fixture(scope="module", params=list(PRECISIONS))
def engine(request: pytest.FixtureRequest, smollm2_engines: Engines) -> Path:
    return smollm2_engines[request.param]


@pytest.fixture(scope="module")
def baseline(engine: Path, prompts: list[list[int]]) -> Baseline:
    rows: dict[History, Float32Array] = {}
    with recorded_llm(engine, num_threads=1, enable_prefix_caching=False) as (llm, record):
        for prompt in prompts:
            (output,) = llm.generate(ids(prompt), greedy(MANY))
            tokens = prompt + output.outputs[0].token_ids[:-1]
            for history in prefixes(tokens):
                rows[history] = record.rows[history][-1]
    return rows


def ids(prompt: list[int]) -> dict[str, object]:
    return {"prompt_token_ids": prompt}


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def assert_recorded_bits(
    record: RecordingExecutable, outputs: list[RequestOutput], baseline: Baseline
) -> None:
    """Every row is bit for bit the baseline's, and every position has one."""
    wanted = {
        history
        for output in outputs
        for history in prefixes(output.prompt_token_ids + output.outputs[0].token_ids[:-1])
    }
    assert set(record.rows) == wanted
    assert_bits(record, baseline)


def assert_bits(record: RecordingExecutable, baseline: Baseline) -> None:
    assert record.rows
    for history, rows in record.rows.items():
        expected = baseline[history].view(np.uint32)
        for row in rows:
            assert np.array_equal(row.view(np.uint32), expected), (
                f"position {len(history) - 1} of {history[:3]}... differs"
            )


@pytest.mark.parametrize("num_threads", [1, 2])
def test_batched(
    engine: Path, prompts: list[list[int]], baseline: Baseline, num_threads: int
) -> None:
    """K11: a batch of four is the same as four of one, on one and two threads."""
    with recorded_llm(engine, num_threads=num_threads) as (llm, record):
        outputs = llm.generate([ids(prompt) for prompt in prompts], greedy(FEW))
    assert_recorded_bits(record, outputs, baseline)


def test_batched_with_only_the_rows_that_are_sampled(
    engine: Path, prompts: list[list[int]], baseline: Baseline
) -> None:
    with recorded_llm(engine, every_position=False) as (llm, record):
        llm.generate([ids(prompt) for prompt in prompts], greedy(FEW))
    assert sum(len(rows) for rows in record.rows.values()) == FEW * len(prompts)
    assert_bits(record, baseline)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_alone_in_any_number_of_threads(
    engine: Path, prompts: list[list[int]], baseline: Baseline, num_threads: int
) -> None:
    with recorded_llm(engine, num_threads=num_threads, every_position=False) as (
        llm,
        record,
    ):
        for prompt in prompts:
            llm.generate(ids(prompt), greedy(FEW))
    assert_bits(record, baseline)


@pytest.mark.parametrize("budget", [1, 3, 16])
def test_chunked(engine: Path, prompts: list[list[int]], baseline: Baseline, budget: int) -> None:
    """K01, K03, K04: 1 and 16 divide a block, 3 does not."""
    with recorded_llm(engine, max_num_batched_tokens=budget) as (llm, record):
        outputs = llm.generate([ids(prompt) for prompt in prompts], greedy(FEW))
    assert_recorded_bits(record, outputs, baseline)


def test_prefix_hits(engine: Path, prompts: list[list[int]], baseline: Baseline) -> None:
    """P01, P02: a full hit, and one of two blocks and a part that another prompt computed."""
    with recorded_llm(engine) as (llm, record):
        cold = llm.generate(ids(prompts[3]), greedy(FEW))
        hits = llm.generate([ids(prompts[3]), ids(prompts[2])], greedy(FEW))
    assert [output.num_cached_tokens for output in cold] == [0]
    assert [output.num_cached_tokens for output in hits] == [64, 35]
    assert_recorded_bits(record, [*cold, *hits], baseline)


def test_after_preemption(engine: Path, prompts: list[list[int]], baseline: Baseline) -> None:
    """K06, K07: two requests that fit the pool at first, and later only one after the other."""
    chosen = [ids(prompt) for prompt in prompts[:2]]
    with recorded_llm(engine, num_kv_blocks=6) as (llm, record):
        outputs = llm.generate(chosen, greedy(MANY))
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert max(len(rows) for rows in record.rows.values()) > 1  # something was computed anew
    assert_recorded_bits(record, outputs, baseline)
