"""A snapshot of an engine's metrics: plain numbers that can be printed, sent and added up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from octavo.runtime.metrics.definitions import METRICS, Metric

# Metric name -> int or float; a dict over the label's values; a HistogramSnapshot. It holds only
# numbers, None, and dicts with text keys, so that JSON and msgpack give back what they were given.
Snapshot = dict[str, Any]

INFINITY = "+Inf"


class HistogramSnapshot(TypedDict):
    """Quantiles are estimates from the buckets; they and the mean are None without a value."""

    count: int
    sum: float
    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    buckets: dict[str, int]  # upper bound -> values up to it, as in Prometheus; the last is "+Inf"


def histogram_snapshot(
    bounds: Sequence[float], counts: Sequence[int], total: float
) -> HistogramSnapshot:
    """`counts` [len(bounds) + 1]: values in each bucket alone, the last one above every bound."""
    buckets = {}
    count = 0
    for bound, in_bucket in zip([*map(bucket_key, bounds), INFINITY], counts, strict=True):
        count += in_bucket
        buckets[bound] = count
    return _with_estimates(bounds, buckets, total)


def bucket_key(bound: float) -> str:
    """A bucket's key: its bound as Prometheus writes it."""
    return str(float(bound))


def empty_snapshot() -> Snapshot:
    """The snapshot of an engine that has done nothing."""
    return {metric.name: _empty(metric) for metric in METRICS.values()}


def accumulate(previous: Snapshot, current: Snapshot) -> Snapshot:
    """`current` with the counters and histograms of the engine before it added.

    `previous` is the last snapshot of an engine that `current`'s has replaced: what was counted
    must not fall back to zero. Gauges are the new engine's.
    """
    return {name: _add(metric, previous[name], current[name]) for name, metric in METRICS.items()}


class SupervisedMetrics:
    """The metrics of an engine that may be replaced: counters never go back."""

    def __init__(self) -> None:
        self._ended = empty_snapshot()
        self._current = empty_snapshot()

    def update(self, snapshot: Snapshot) -> None:
        """Takes the newest snapshot of the engine that runs now."""
        self._current = snapshot

    def engine_ended(self) -> None:
        """The engine is gone and its gauges with it; the next snapshot starts at zero."""
        self._ended = accumulate(self._ended, self._current)
        self._current = empty_snapshot()

    def snapshot(self) -> Snapshot:
        return accumulate(self._ended, self._current)


def _empty(metric: Metric) -> Any:
    if metric.kind == "histogram":
        return histogram_snapshot(metric.buckets, [0] * (len(metric.buckets) + 1), 0.0)
    return 0 if metric.label is None else dict.fromkeys(metric.label_values, 0)


def _add(metric: Metric, previous: Any, current: Any) -> Any:
    if metric.kind == "gauge":
        return current
    if metric.kind == "histogram":
        buckets = _add_keys(previous["buckets"], current["buckets"])
        return _with_estimates(metric.buckets, buckets, previous["sum"] + current["sum"])
    return previous + current if metric.label is None else _add_keys(previous, current)


def _add_keys(previous: Mapping[str, int], current: Mapping[str, int]) -> dict[str, int]:
    return {key: previous[key] + count for key, count in current.items()}


def _with_estimates(
    bounds: Sequence[float], buckets: dict[str, int], total: float
) -> HistogramSnapshot:
    cumulative = list(buckets.values())
    count = cumulative[-1]
    return HistogramSnapshot(
        count=count,
        sum=total,
        mean=total / count if count else None,
        p50=_quantile(0.5, bounds, cumulative),
        p90=_quantile(0.9, bounds, cumulative),
        p99=_quantile(0.99, bounds, cumulative),
        buckets=buckets,
    )


def _quantile(share: float, bounds: Sequence[float], cumulative: Sequence[int]) -> float | None:
    """As Prometheus' `histogram_quantile`: values lie evenly in a bucket, the first begins at 0.

    Above the last bound nothing is known, so it is the answer there.
    """
    if not cumulative[-1]:
        return None
    rank = share * cumulative[-1]
    below = 0
    lower = 0.0
    for bound, up_to in zip(bounds, cumulative, strict=False):
        if up_to >= rank:
            return lower + (bound - lower) * (rank - below) / (up_to - below)
        below, lower = up_to, float(bound)
    return lower
