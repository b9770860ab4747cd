"""An engine's metrics for Prometheus. Needs the extra `serve`; everything else works without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from octavo.graphs.errors import OctavoError
from octavo.runtime.metrics.definitions import METRICS, Metric
from octavo.runtime.metrics.snapshots import Snapshot

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric as MetricFamily

# Of `exposition`. A server should not offer OpenMetrics beside it: prometheus-client 0.26 writes
# the colon of a name as an underscore there unless the other side asks for UTF-8 names.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class SnapshotCollector:
    """A collector of prometheus_client: every scrape takes one snapshot.

    snapshot   gives the snapshot to expose; called in the thread that scrapes
    labels     of every sample, such as {"model_name": "smollm2"}
    registry   where to register it, if anywhere; a registry refuses a second collector

    Raises OctavoError if prometheus-client is not installed.
    """

    def __init__(
        self,
        snapshot: Callable[[], Snapshot],
        labels: Mapping[str, str] | None = None,
        registry: CollectorRegistry | None = None,
    ) -> None:
        try:
            from prometheus_client import exposition, metrics_core
        except ImportError as error:
            raise OctavoError(
                f"metrics for Prometheus need prometheus-client ({error}): install `octavo[serve]`"
            ) from error
        self._exposition = exposition
        self._core = metrics_core
        self._snapshot = snapshot
        self._labels = dict(labels or {})
        if registry is not None:
            registry.register(self)

    def describe(self) -> Iterator[MetricFamily]:
        """Every family without samples: a registry reads the names without taking a snapshot."""
        return map(self._family, METRICS.values())

    def collect(self) -> Iterator[MetricFamily]:
        snapshot = self._snapshot()
        for metric in METRICS.values():
            family = self._family(metric)
            self._add(family, metric, snapshot[metric.name])
            yield family

    def exposition(self) -> str:
        """These metrics alone in Prometheus' text format (version 0.0.4)."""
        return self._exposition.generate_latest(self).decode()

    def _family(self, metric: Metric) -> Any:
        kinds = {
            "counter": self._core.CounterMetricFamily,
            "gauge": self._core.GaugeMetricFamily,
            "histogram": self._core.HistogramMetricFamily,
        }
        names = [*self._labels, *([] if metric.label is None else [metric.label])]
        return kinds[metric.kind](metric.exposed_name, metric.documentation, labels=names)

    def _add(self, family: Any, metric: Metric, value: Any) -> None:
        labels = list(self._labels.values())
        if metric.kind == "histogram":
            family.add_metric(labels, list(value["buckets"].items()), value["sum"])
        elif metric.label is None:
            family.add_metric(labels, value)
        else:
            for label_value, part in value.items():
                family.add_metric([*labels, label_value], part)
