"""Snapshots as Prometheus reads them."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from octavo.graphs.errors import OctavoError
from octavo.runtime.metrics.definitions import METRICS
from octavo.runtime.metrics.engine_metrics import Histogram
from octavo.runtime.metrics.prometheus import CONTENT_TYPE, SnapshotCollector
from octavo.runtime.metrics.snapshots import Snapshot, empty_snapshot

LABELS = {"model_name": 'a "quoted" \\ model'}


def make_snapshot() -> Snapshot:
    """One whose every value differs from every other metric's."""
    snapshot = empty_snapshot()
    for index, metric in enumerate(METRICS.values(), 1):
        if metric.kind == "histogram":
            histogram = Histogram(metric.buckets)
            for _ in range(index):
                histogram.observe(metric.buckets[index % len(metric.buckets)])
            histogram.observe(1e6)
            snapshot[metric.name] = histogram.snapshot()
        elif metric.label is None:
            snapshot[metric.name] = index / 8
        else:
            snapshot[metric.name] = {v: 100 * index + i for i, v in enumerate(metric.label_values)}
    return snapshot


def expected_samples(
    labels: Mapping[str, str],
) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """The samples of `make_snapshot`, by Prometheus' rules for names."""
    samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}

    def add(name: str, value: float, **more: str) -> None:
        samples[f"octavo:{name}", frozenset({**labels, **more}.items())] = value

    for name, value in make_snapshot().items():
        metric = METRICS[name]
        if metric.kind == "gauge":
            add(name, value)
        elif metric.kind == "histogram":
            add(f"{name}_count", value["count"])
            add(f"{name}_sum", value["sum"])
            for bound, count in value["buckets"].items():
                add(f"{name}_bucket", count, le=bound)
        elif metric.label is None:
            add(f"{name}_total", value)
        else:
            for part, count in value.items():
                add(f"{name}_total", count, **{metric.label: part})
    return samples


@pytest.mark.parametrize("labels", [{}, LABELS])
def test_the_exposition_says_what_the_snapshot_says(labels: dict[str, str]) -> None:
    text = SnapshotCollector(make_snapshot, labels).exposition()
    families = list(text_string_to_metric_families(text))
    assert {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    } == expected_samples(labels)
    assert {family.name: (family.type, family.documentation) for family in families} == {
        metric.exposed_name: (metric.kind, metric.documentation) for metric in METRICS.values()
    }


def test_a_few_lines_of_the_exposition() -> None:
    snapshot = empty_snapshot()
    snapshot["num_requests_running"] = 2
    snapshot["request_success"]["stop"] = 5
    histogram = Histogram(METRICS["request_params_n"].buckets)
    histogram.observe(1)
    histogram.observe(4)
    snapshot["request_params_n"] = histogram.snapshot()
    lines = SnapshotCollector(lambda: snapshot, {"model_name": "m"}).exposition().splitlines()
    for line in (
        "# TYPE octavo:num_requests_running gauge",
        'octavo:num_requests_running{model_name="m"} 2.0',
        'octavo:request_success_total{finished_reason="stop",model_name="m"} 5.0',
        'octavo:request_params_n_bucket{le="2.0",model_name="m"} 1.0',
        'octavo:request_params_n_bucket{le="+Inf",model_name="m"} 2.0',
        'octavo:request_params_n_sum{model_name="m"} 5.0',
        'octavo:prompt_tokens_total{model_name="m"} 0.0',
    ):
        assert line in lines


def test_it_registers_and_every_scrape_takes_one_snapshot() -> None:
    num_snapshots = 0

    def snapshot() -> Snapshot:
        nonlocal num_snapshots
        num_snapshots += 1
        return make_snapshot()

    registry = CollectorRegistry(auto_describe=True)
    collector = SnapshotCollector(snapshot, LABELS, registry)
    assert num_snapshots == 0
    assert generate_latest(registry).decode() == collector.exposition()
    assert num_snapshots == 2


def test_a_registry_refuses_a_second_collector() -> None:
    registry = CollectorRegistry()
    SnapshotCollector(empty_snapshot, registry=registry)
    with pytest.raises(ValueError, match="octavo:num_requests_running"):
        SnapshotCollector(empty_snapshot, registry=registry)


def test_the_content_type_is_that_of_prometheus_clients_text_format() -> None:
    assert CONTENT_TYPE == CONTENT_TYPE_PLAIN_0_0_4


def test_without_prometheus_client_the_error_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(OctavoError, match=r"prometheus-client .*install `octavo\[serve\]`"):
        SnapshotCollector(empty_snapshot)
