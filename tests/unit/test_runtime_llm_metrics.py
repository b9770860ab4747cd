"""What an engine has counted after requests whose numbers are worked out by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.graphs.errors import BackendError, QueueFullError
from octavo.runtime.llm_engine import LLMEngine
from octavo.runtime.sampling.beam_search import BeamSearchParams
from octavo.runtime.sampling.logits_processors import LogitsRow
from tests.unit.llm_engines import complete, greedy, ids, letters, run
from tests.unit.runtime_bundles import write_text_engine
from tests.unit.runtime_harness import random_tokens

PROMPT = random_tokens(10)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[LLMEngine]:
    loaded = LLMEngine(write_text_engine(tmp_path / "engine"), max_num_waiting=2)
    yield loaded
    loaded.close()


def sums(engine: LLMEngine, *names: str) -> list[tuple[int, float]]:
    """(count, sum) of histograms."""
    metrics = engine.metrics()
    return [(metrics[name]["count"], metrics[name]["sum"]) for name in names]


def counters(engine: LLMEngine) -> dict[str, Any]:
    metrics = engine.metrics()
    names = ("prompt_tokens", "prompt_tokens_cached", "generation_tokens", "num_preemptions")
    counted = {name: metrics[name] for name in names}
    return {**counted, **{k: v for k, v in metrics["request_success"].items() if v}}


def test_one_request_and_the_same_again(engine: LLMEngine) -> None:
    complete(engine, PROMPT, greedy(max_tokens=4))
    metrics = engine.metrics()
    assert (metrics["prefix_cache_queries"], metrics["prefix_cache_hits"]) == (10, 0)
    complete(engine, PROMPT, greedy(max_tokens=4))
    assert counters(engine) == {
        "prompt_tokens": 20,
        "prompt_tokens_cached": 9,
        "generation_tokens": 8,
        "num_preemptions": 0,
        "length": 2,
    }
    metrics = engine.metrics()
    assert (metrics["prefix_cache_queries"], metrics["prefix_cache_hits"]) == (20, 9)
    # Steps of 10, 1, 1, 1 and of 1, 1, 1, 1 tokens.
    assert sums(engine, "iteration_tokens_total") == [(8, 17)]
    assert metrics["iteration_tokens_total"]["buckets"]["1.0"] == 7
    assert sums(engine, "request_prompt_tokens", "request_generation_tokens") == [(2, 20), (2, 8)]
    assert sums(engine, "request_params_n", "request_params_max_tokens") == [(2, 2), (2, 8)]
    assert [
        metrics[name]["count"]
        for name in (
            "time_to_first_token_seconds",
            "inter_token_latency_seconds",
            "e2e_request_latency_seconds",
            "request_queue_time_seconds",
        )
    ] == [2, 6, 2, 2]


def test_several_completions_share_a_prompt(engine: LLMEngine) -> None:
    complete(engine, PROMPT, letters(n=3, max_tokens=5))
    assert counters(engine) == {
        "prompt_tokens": 10,
        "prompt_tokens_cached": 0,
        "generation_tokens": 15,
        "num_preemptions": 0,
        "length": 3,
    }
    assert sums(engine, "iteration_tokens_total") == [(5, 10 + 4 * 3)]
    assert sums(engine, "request_params_n", "request_generation_tokens") == [(1, 3), (3, 15)]
    assert engine.metrics()["prefix_cache_queries"] == 10


def test_a_beam_search_is_one_request(engine: LLMEngine) -> None:
    complete(engine, PROMPT, BeamSearchParams(beam_width=3, max_tokens=4))
    engine.add_request("aborted", ids([1, 2, 3]), BeamSearchParams(beam_width=3, max_tokens=4))
    engine.step()
    engine.step()
    engine.abort_request("aborted")
    counted = counters(engine)
    assert (counted["prompt_tokens"], counted["length"], counted["abort"]) == (13, 1, 1)
    # One from the prompt, then those of each running beam: 1 + 3 * 3, and 1 + 3.
    assert counted["generation_tokens"] == 14
    assert sums(engine, "iteration_tokens_total") == [(6, 10 + 3 * 3 + 3 + 3)]


def test_rejections_errors_and_aborts(tmp_path: Path) -> None:
    engine = LLMEngine(write_text_engine(tmp_path / "engine"), max_num_waiting=1, max_num_seqs=1)

    def fail(row: LogitsRow) -> None:
        raise ValueError("no")

    engine.add_request("aborted", ids(PROMPT), letters(n=2))
    engine.add_request("failing", ids([1, 2, 3]), greedy(logits_processors=[fail]))
    with pytest.raises(QueueFullError, match="1 requests are waiting, max_num_waiting is 1"):
        engine.add_request("refused", ids([4]), greedy())
    assert engine.metrics()["num_requests_waiting"] == 2
    engine.abort_request("aborted")
    run(engine)
    assert counters(engine) == {
        "prompt_tokens": 3,
        "prompt_tokens_cached": 0,
        "generation_tokens": 0,
        "num_preemptions": 0,
        "abort": 2,
        "error": 1,
    }
    metrics = engine.metrics()
    assert metrics["admission_rejections"] == 1
    assert metrics["request_params_n"]["count"] == 2
    # What was aborted or failed says nothing of how long requests take.
    assert sums(engine, "request_prompt_tokens", "e2e_request_latency_seconds") == [(0, 0), (0, 0)]


def test_gauges_follow_the_queue_and_the_pool(tmp_path: Path) -> None:
    engine = LLMEngine(write_text_engine(tmp_path / "engine"), num_kv_blocks=20, max_num_seqs=2)
    for index in range(3):
        engine.add_request(str(index), ids(random_tokens(9, seed=index)), greedy(max_tokens=2))
    engine.step()
    metrics = engine.metrics()
    assert (metrics["num_requests_running"], metrics["num_requests_waiting"]) == (2, 1)
    # 9 tokens are 3 blocks each.
    assert metrics["kv_cache_usage_perc"] == pytest.approx(6 / 20)
    run(engine)
    metrics = engine.metrics()
    assert (metrics["num_requests_running"], metrics["num_requests_waiting"]) == (0, 0)
    assert metrics["kv_cache_usage_perc"] == 0


def test_a_failed_step_is_not_counted(engine: LLMEngine) -> None:
    executable: Any = engine.engine._executable
    execute = executable.run

    def fail(inputs: object) -> None:
        raise BackendError("the step failed")

    engine.add_request("a", ids(PROMPT), greedy(max_tokens=2))
    executable.run = fail
    for _ in range(3):
        with pytest.raises(BackendError):
            engine.step()
    executable.run = execute
    run(engine)
    assert sums(engine, "iteration_tokens_total") == [(2, 11)]
    assert counters(engine)["generation_tokens"] == 2
    assert engine.metrics()["prefix_cache_queries"] == 10


def test_evictions_are_counted(tmp_path: Path) -> None:
    engine = LLMEngine(
        write_text_engine(tmp_path / "engine"), num_kv_blocks=5, eviction_policy="lru"
    )
    # 4 full blocks and one that never fills: 4 stay cached, and make place for the next 4.
    for seed in range(2):
        complete(engine, random_tokens(17, seed=seed), greedy(max_tokens=2))
    assert engine.metrics()["prefix_cache_evictions"] == 4
