"""What an engine counts, its snapshots, and what is left of them when an engine is replaced."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.runtime.cache.block_pool import BlockPool
from octavo.runtime.cache.prefix_cache import PrefixCache
from octavo.runtime.capacity import EngineLimits
from octavo.runtime.metrics.definitions import METRICS, Metric
from octavo.runtime.metrics.engine_metrics import EngineMetrics, Histogram
from octavo.runtime.metrics.snapshots import (
    HistogramSnapshot,
    Snapshot,
    SupervisedMetrics,
    accumulate,
    empty_snapshot,
    histogram_snapshot,
)
from octavo.runtime.request import FinishReason, Request
from octavo.runtime.sampling.sampling_params import SamplingParams
from octavo.runtime.scheduler import Scheduler
from tests.unit.runtime_harness import Harness, random_tokens

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
BLOCK_SIZE = 16


def make_request(num_prompt_tokens: int = 3, *, arrival: float = 0.0) -> Request:
    request = Request(
        "r",
        [7] * num_prompt_tokens,
        SamplingParams(max_tokens=None),
        max_model_len=1024,
        eos_token_ids=(),
        seed=0,
    )
    request.times.arrival = arrival
    return request


def gain(metrics: EngineMetrics, request: Request, count: int, now: float) -> None:
    """What the engine does when a step gives a request tokens."""
    for _ in range(count):
        request.append_token(1)
    request.times.mark_tokens(now)
    metrics.observe_tokens(request, count)


def finish(metrics: EngineMetrics, request: Request, reason: FinishReason, now: float) -> None:
    request.finish(reason)
    request.times.finished = now
    metrics.observe_finished(request)


def make_scheduler(*, num_kv_blocks: int = 8, enable_prefix_caching: bool = True) -> Scheduler:
    limits = EngineLimits(
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=128,
        block_size=BLOCK_SIZE,
        num_kv_blocks=num_kv_blocks,
    )
    pool = BlockPool(num_kv_blocks)
    cache = PrefixCache(pool, BLOCK_SIZE) if enable_prefix_caching else None
    return Scheduler(limits, pool, cache)


def snapshot(metrics: EngineMetrics) -> Snapshot:
    return metrics.snapshot(make_scheduler())


def filled(histogram: HistogramSnapshot) -> dict[str, int]:
    """Values in each bucket alone, of those that hold any."""
    alone = {}
    below = 0
    for bound, up_to in histogram["buckets"].items():
        if up_to > below:
            alone[bound] = up_to - below
        below = up_to
    return alone


def test_a_value_counts_in_the_first_bucket_whose_bound_is_not_below_it() -> None:
    histogram = Histogram((1, 2, 4))
    for value in (0, 1, 1.5, 2, 4, 4.25, 100):
        histogram.observe(value)
    taken = histogram.snapshot()
    assert taken["buckets"] == {"1.0": 2, "2.0": 4, "4.0": 5, "+Inf": 7}
    assert (taken["count"], taken["sum"], taken["mean"]) == (7, 112.75, 112.75 / 7)


def test_quantiles_lie_evenly_in_their_bucket() -> None:
    # Ranks of 20 values: p50 is the 10th, p90 the 18th, p99 19.8.
    taken = histogram_snapshot((1.0, 2.0, 4.0), (5, 10, 5, 0), 30.0)
    assert taken["p50"] == 1.5  # the 5th of 10 in 1..2
    assert taken["p90"] == pytest.approx(3.2)  # the 3rd of 5 in 2..4
    assert taken["p99"] == pytest.approx(3.92)  # 4.8 of 5 in 2..4


def test_a_quantile_above_the_last_bound_is_that_bound() -> None:
    taken = histogram_snapshot((1.0, 2.0), (1, 0, 9), 100.0)
    assert (taken["p50"], taken["p99"]) == (2.0, 2.0)


def test_a_quantile_skips_empty_buckets() -> None:
    taken = histogram_snapshot((1.0, 2.0, 4.0), (0, 0, 2, 0), 6.0)
    assert taken["p50"] == 3.0
    assert taken["p90"] == pytest.approx(3.8)


def test_an_empty_histogram_has_no_mean_and_no_quantiles() -> None:
    taken = histogram_snapshot((1.0,), (0, 0), 0.0)
    assert taken == {
        "count": 0,
        "sum": 0.0,
        "mean": None,
        "p50": None,
        "p90": None,
        "p99": None,
        "buckets": {"1.0": 0, "+Inf": 0},
    }


def test_the_first_tokens_wait_counts_from_arrival_and_later_ones_from_the_step_before() -> None:
    metrics = EngineMetrics()
    first = make_request(arrival=100.0)
    second = make_request(arrival=100.125)
    gain(metrics, first, 1, 100.25)
    gain(metrics, first, 1, 100.28125)  # 1/32 s later
    gain(metrics, second, 1, 100.5)
    gain(metrics, first, 1, 100.5)  # 7/32 s later
    gain(metrics, second, 1, 100.53125)  # 1/32 s later

    taken = snapshot(metrics)
    first_token = taken["time_to_first_token_seconds"]
    assert filled(first_token) == {"0.25": 1, "0.5": 1}  # 0.25 and 0.375 s
    assert (first_token["count"], first_token["sum"], first_token["mean"]) == (2, 0.625, 0.3125)
    latency = taken["inter_token_latency_seconds"]
    assert filled(latency) == {"0.05": 2, "0.3": 1}
    assert (latency["count"], latency["sum"], latency["mean"]) == (3, 9 / 32, 3 / 32)
    assert taken["generation_tokens"] == 5


def test_tokens_that_come_together_are_one_wait() -> None:
    metrics = EngineMetrics()
    request = make_request()
    gain(metrics, request, 3, 0.5)
    gain(metrics, request, 4, 0.75)
    taken = snapshot(metrics)
    assert filled(taken["time_to_first_token_seconds"]) == {"0.5": 1}
    assert filled(taken["inter_token_latency_seconds"]) == {"0.3": 1}
    assert taken["generation_tokens"] == 7


def test_a_finished_request_adds_its_times_and_sizes() -> None:
    metrics = EngineMetrics()
    request = make_request(40, arrival=10.0)
    request.times.first_scheduled = 10.25
    request.num_preemptions = 2
    gain(metrics, request, 1, 11.0)
    gain(metrics, request, 1, 11.25)
    gain(metrics, request, 3, 15.0)
    finish(metrics, request, "length", 15.5)

    taken = snapshot(metrics)
    sums = {
        "request_queue_time_seconds": 0.25,
        "request_prefill_time_seconds": 0.75,
        "request_decode_time_seconds": 4.0,
        "request_inference_time_seconds": 4.75,
        "request_time_per_output_token_seconds": 1.0,  # 4 s for the 4 tokens after the first
        "e2e_request_latency_seconds": 5.5,
        "request_prompt_tokens": 40,
        "request_generation_tokens": 5,
        "request_num_preemptions": 2,
    }
    assert {name: taken[name]["sum"] for name in sums} == sums
    assert {name: taken[name]["count"] for name in sums} == dict.fromkeys(sums, 1)
    assert filled(taken["e2e_request_latency_seconds"]) == {"10.0": 1}
    assert filled(taken["request_prompt_tokens"]) == {"50.0": 1}
    assert taken["request_success"] == {"stop": 0, "length": 1, "abort": 0, "error": 0}


def test_one_token_has_no_time_per_output_token() -> None:
    metrics = EngineMetrics()
    request = make_request()
    gain(metrics, request, 1, 0.5)
    finish(metrics, request, "stop", 0.5)
    taken = snapshot(metrics)
    assert taken["request_time_per_output_token_seconds"]["count"] == 0
    assert taken["e2e_request_latency_seconds"]["count"] == 1


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_a_request_that_did_not_complete_is_only_counted(reason: FinishReason) -> None:
    metrics = EngineMetrics()
    finish(metrics, make_request(), reason, 4.0)
    expected = empty_snapshot()
    expected["request_success"][reason] = 1
    assert snapshot(metrics) == expected


def test_steps_parameters_prompts_and_refusals() -> None:
    metrics = EngineMetrics()
    metrics.observe_params(1, 64)
    metrics.observe_params(4, None)
    metrics.observe_rejection()
    request = make_request(107)
    request.num_cached_tokens = 48
    metrics.observe_scheduled(request)
    metrics.observe_step(59, 0.125)
    metrics.observe_step(2, 0.0625)

    taken = snapshot(metrics)
    assert filled(taken["request_params_n"]) == {"1.0": 1, "5.0": 1}
    assert filled(taken["request_params_max_tokens"]) == {"100.0": 1}
    assert taken["admission_rejections"] == 1
    assert (taken["prompt_tokens"], taken["prompt_tokens_cached"]) == (107, 48)
    assert filled(taken["iteration_tokens_total"]) == {"8.0": 1, "64.0": 1}
    assert taken["iteration_tokens_total"]["sum"] == 61
    assert filled(taken["iteration_time_seconds"]) == {"0.1": 1, "0.25": 1}


def test_gauges_are_read_when_the_snapshot_is_taken() -> None:
    scheduler = make_scheduler(num_kv_blocks=8)
    metrics = EngineMetrics()
    scheduler.add(make_request(40))
    taken = metrics.snapshot(scheduler)
    assert (taken["num_requests_running"], taken["num_requests_waiting"]) == (0, 1)
    assert taken["kv_cache_usage_perc"] == 0.0

    scheduler.plan()
    taken = metrics.snapshot(scheduler)
    assert (taken["num_requests_running"], taken["num_requests_waiting"]) == (1, 0)
    assert taken["kv_cache_usage_perc"] == 0.375  # 40 tokens lie in 3 of 8 blocks


def test_preemptions_are_those_of_the_scheduler() -> None:
    scheduler = make_scheduler()
    scheduler.num_preemptions = 3
    assert EngineMetrics().snapshot(scheduler)["num_preemptions"] == 3


def test_a_whole_run_is_counted() -> None:
    """One prompt of 40 tokens twice, 4 tokens each: 32 tokens of the second are a prefix hit."""
    harness = Harness(block_size=16)
    prompt = random_tokens(40)
    for _ in range(2):
        harness.add(prompt, max_tokens=4)
        harness.run()
    harness.engine.abort(harness.add(prompt))

    taken = harness.engine.metrics.snapshot(harness.engine.scheduler)
    assert (taken["prompt_tokens"], taken["prompt_tokens_cached"]) == (80, 32)
    assert (taken["prefix_cache_queries"], taken["prefix_cache_hits"]) == (80, 32)
    assert taken["prefix_cache_evictions"] == 0
    assert taken["generation_tokens"] == 8
    assert taken["request_success"] == {"stop": 0, "length": 2, "abort": 1, "error": 0}
    assert taken["iteration_tokens_total"]["count"] == 8
    assert taken["iteration_tokens_total"]["sum"] == 40 + 3 + 8 + 3
    assert taken["iteration_time_seconds"]["count"] == 8
    assert taken["time_to_first_token_seconds"]["count"] == 2
    assert taken["inter_token_latency_seconds"]["count"] == 6
    assert taken["e2e_request_latency_seconds"]["count"] == 2
    assert taken["kv_cache_usage_perc"] == 0.0


def test_a_failed_step_is_not_counted() -> None:
    harness = Harness()
    harness.add(random_tokens(5), max_tokens=1)

    def fail() -> None:
        raise MemoryError

    harness.executable.on_run = fail
    with pytest.raises(MemoryError):
        harness.step()
    taken = harness.engine.metrics.snapshot(harness.engine.scheduler)
    assert taken == {**empty_snapshot(), "num_requests_waiting": 1}


def test_without_a_prefix_cache_its_counters_are_zero() -> None:
    taken = EngineMetrics().snapshot(make_scheduler(enable_prefix_caching=False))
    assert taken == empty_snapshot()


def test_a_snapshot_holds_every_metric_in_the_order_of_the_table() -> None:
    assert list(snapshot(EngineMetrics())) == list(METRICS)
    assert snapshot(EngineMetrics()) == empty_snapshot()


def test_a_snapshot_is_not_changed_by_what_follows() -> None:
    metrics = EngineMetrics()
    before = snapshot(metrics)
    request = make_request()
    gain(metrics, request, 1, 0.5)
    finish(metrics, request, "stop", 0.5)
    assert before == empty_snapshot()


def test_a_snapshot_is_plain_data() -> None:
    metrics = EngineMetrics()
    gain(metrics, make_request(), 1, 0.5)
    taken = snapshot(metrics)
    assert json.loads(json.dumps(taken, allow_nan=False)) == taken


def engine_that_did(first_token: float, reason: FinishReason, num_tokens: int) -> EngineMetrics:
    metrics = EngineMetrics()
    request = make_request()
    gain(metrics, request, num_tokens, first_token)
    finish(metrics, request, reason, first_token)
    return metrics


def test_accumulated_snapshots_are_those_of_one_engine_that_did_both() -> None:
    both = engine_that_did(0.5, "stop", 3)
    request = make_request()
    gain(both, request, 4, 3.0)
    finish(both, request, "length", 3.0)
    previous = snapshot(engine_that_did(0.5, "stop", 3))
    current = snapshot(engine_that_did(3.0, "length", 4))
    assert accumulate(previous, current) == snapshot(both)


def test_counters_never_go_back_when_an_engine_is_replaced() -> None:
    supervised = SupervisedMetrics()
    seen: list[Snapshot] = []

    def look() -> None:
        seen.append(supervised.snapshot())

    for first_token, num_tokens in ((0.5, 3), (3.0, 4), (0.5, 5)):
        taken = snapshot(engine_that_did(first_token, "stop", num_tokens))
        taken["num_requests_running"] = 2
        supervised.update(taken)
        look()
        supervised.update(taken)  # the same engine again: nothing is counted twice
        look()
        supervised.engine_ended()
        look()

    assert [taken["generation_tokens"] for taken in seen] == [3, 3, 3, 7, 7, 7, 12, 12, 12]
    assert [taken["request_success"]["stop"] for taken in seen] == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert [taken["num_requests_running"] for taken in seen] == [2, 2, 0] * 3
    first_token_times = seen[-1]["time_to_first_token_seconds"]
    assert filled(first_token_times) == {"0.5": 2, "5.0": 1}
    assert (first_token_times["sum"], first_token_times["mean"]) == (4.0, 4.0 / 3)
    # The 2nd of 3 values is at rank 1.5 of 2 in 0.25..0.5.
    assert first_token_times["p50"] == 0.4375


def document_row(metric: Metric) -> str:
    label = f" by `{metric.label}`" if metric.label else ""
    return f"| `{metric.name}` | {metric.kind}{label} | {metric.documentation} |"


def test_the_document_lists_every_metric() -> None:
    rows = [line for line in DOCUMENT.read_text("utf-8").splitlines() if line.startswith("| `")]
    assert rows == [document_row(metric) for metric in METRICS.values()]
