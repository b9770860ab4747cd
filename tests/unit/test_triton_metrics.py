"""An engine's metrics as a Triton server shows them."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.runtime.metrics.definitions import METRICS
from octavo.runtime.metrics.snapshots import Snapshot, empty_snapshot, histogram_snapshot
from octavo.tools.triton.child_metrics import VLLM_NAMES, exposed_metrics
from octavo.tools.triton.stub.metrics import ServerMetrics
from tests.unit.triton_fakes import backend_utils

LABELS = {"model": "m", "version": "1", "instance": "m_0_0"}


class Shown:
    """What the metrics port shows: the value of a sample by name and labels."""

    def __init__(self) -> None:
        self._utils = backend_utils()
        self.metrics = ServerMetrics(self._utils, LABELS, exposed_metrics())

    def publish(self, generation: int, snapshot: Snapshot | None, *, healthy: bool = True) -> None:
        self.metrics.publish(healthy=healthy, generation=generation, snapshot=snapshot)

    def __getitem__(self, name: str) -> float:
        return self.value(name)

    def value(self, name: str, **labels: str) -> float:
        (found,) = [
            metric.value
            for metric in self._utils.MetricFamily.made[name].metrics
            if metric.labels == {**LABELS, **labels}
        ]
        return float(found)

    def kind(self, name: str) -> Any:
        return self._utils.MetricFamily.made[name].kind


@pytest.fixture
def shown() -> Shown:
    return Shown()


def snapshot(**values: Any) -> Snapshot:
    return {**empty_snapshot(), **values}


def test_every_metric_is_there_from_the_start_under_its_prometheus_name(shown: Shown) -> None:
    shown.publish(1, empty_snapshot())
    for metric in METRICS.values():
        name = metric.exposed_name
        if metric.kind == "histogram":
            assert shown[f"{name}_count"] == shown[f"{name}_sum"] == 0
            assert shown.value(f"{name}_bucket", le="+Inf") == 0
        elif metric.label is not None:
            for value in metric.label_values:
                assert shown.value(f"{name}_total", **{metric.label: value}) == 0
        else:
            assert shown[f"{name}_total" if metric.kind == "counter" else name] == 0


def test_a_counter_grows_by_what_is_new(shown: Shown) -> None:
    for count in (5, 5, 12):
        shown.publish(1, snapshot(generation_tokens=count))
        assert shown["octavo:generation_tokens_total"] == count
        assert shown["vllm:generation_tokens_total"] == count
    assert shown.kind("octavo:generation_tokens_total") == "counter"


def test_a_new_engine_counts_on_from_the_dead_ones_numbers(shown: Shown) -> None:
    shown.publish(1, snapshot(generation_tokens=100, num_requests_running=4))
    shown.publish(1, None, healthy=False)
    assert shown["octavo:engine_up"] == 0
    assert shown["octavo:num_requests_running"] == 0
    shown.publish(2, snapshot(generation_tokens=30))
    assert shown["octavo:generation_tokens_total"] == 130
    shown.publish(2, snapshot(generation_tokens=31))
    assert shown["octavo:generation_tokens_total"] == 131
    assert shown["octavo:engine_up"] == 1
    assert shown["octavo:engine_starts_total"] == 2


def test_a_gauge_is_the_value_of_now(shown: Shown) -> None:
    for usage in (0.5, 0.25):
        shown.publish(1, snapshot(kv_cache_usage_perc=usage))
        assert shown["octavo:kv_cache_usage_perc"] == usage
    assert shown.kind("octavo:kv_cache_usage_perc") == "gauge"


def test_a_labelled_counter_has_a_value_for_each_label(shown: Shown) -> None:
    ended = {"stop": 2, "length": 3, "abort": 0, "error": 1}
    shown.publish(1, snapshot(request_success=ended))
    for reason, count in ended.items():
        assert shown.value("octavo:request_success_total", finished_reason=reason) == count


@pytest.mark.parametrize("prefix", ["octavo:", "vllm:"])
def test_a_histogram_is_its_buckets_its_sum_and_its_count(shown: Shown, prefix: str) -> None:
    bounds = METRICS["e2e_request_latency_seconds"].buckets
    counts = [0] * (len(bounds) + 1)
    counts[0], counts[1], counts[-1] = 2, 1, 1  # up to 1 ms, up to 5 ms, above every bound
    values = histogram_snapshot(bounds, counts, 8000.006)
    shown.publish(1, snapshot(e2e_request_latency_seconds=values))
    name = f"{prefix}e2e_request_latency_seconds"
    assert shown.value(f"{name}_bucket", le="0.001") == 2
    assert shown.value(f"{name}_bucket", le="0.005") == 3
    assert shown.value(f"{name}_bucket", le="7680.0") == 3
    assert shown.value(f"{name}_bucket", le="+Inf") == shown[f"{name}_count"] == 4
    assert shown[f"{name}_sum"] == pytest.approx(8000.006)


def test_the_names_of_the_vllm_backend_have_the_suffix_of_their_kind() -> None:
    for name, metric in VLLM_NAMES.items():
        assert name.endswith("_total") == (metric.kind == "counter")
