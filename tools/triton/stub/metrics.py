"""An engine's metrics on the server's metrics port."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

ENGINE_UP = "octavo:engine_up"
ENGINE_STARTS = "octavo:engine_starts_total"


class ServerMetrics:
    """Follows the snapshots of an engine, and of those that take its place.

    A histogram is exposed as the counters that it consists of (`_bucket` by `le`, `_sum`,
    `_count`), which queries cannot tell from one: Triton's own histograms take a call for every
    single value, and releases before 24.12 have none.

    definitions  `name`, `kind`, `label` and `documentation` of every metric, and under `exposed`
                 the names to give it
    labels       of every sample
    """

    def __init__(
        self, pb_utils: Any, labels: dict[str, str], definitions: list[dict[str, Any]]
    ) -> None:
        self._family_kinds = pb_utils.MetricFamily
        self._labels = labels
        self._definitions = definitions
        self._families: dict[str, Any] = {}
        self._metrics: dict[tuple[str, str], Any] = {}
        self._values: dict[tuple[str, str], float] = {}  # counters, as last seen
        self._generation = 0

    def publish(self, *, healthy: bool, generation: int, snapshot: dict[str, Any] | None) -> None:
        """`generation`: which engine the snapshot is of; another one counts from zero."""
        self._set(ENGINE_UP, "Whether the engine runs: 1, or 0 while it does not.", {}, healthy)
        if generation != self._generation:
            self._generation = generation
            starts = self._values.get((ENGINE_STARTS, ""), 0.0)
            self._values = {(ENGINE_STARTS, ""): starts}
        self._add(ENGINE_STARTS, "Times that the engine was started.", {}, generation)
        for definition in self._definitions:
            if snapshot is not None:
                self._follow(definition, snapshot[definition["name"]])
            elif definition["kind"] == "gauge":
                for name in definition["exposed"]:
                    self._set(name, definition["documentation"], {}, 0)

    def close(self) -> None:
        """A family has to outlive its metrics."""
        self._metrics.clear()
        self._families.clear()

    def _follow(self, definition: dict[str, Any], value: Any) -> None:
        change = self._set if definition["kind"] == "gauge" else self._add
        for exposed in definition["exposed"]:
            for name, labels, number in _samples(definition, exposed, value):
                change(name, definition["documentation"], labels, number)

    def _set(self, name: str, documentation: str, labels: dict[str, str], value: float) -> None:
        self._metric("GAUGE", name, documentation, labels).set(float(value))

    def _add(self, name: str, documentation: str, labels: dict[str, str], value: float) -> None:
        metric = self._metric("COUNTER", name, documentation, labels)
        key = name, "".join(labels.values())
        grown = value - self._values.get(key, 0.0)
        if grown > 0:
            metric.increment(float(grown))
            self._values[key] = value

    def _metric(self, kind: str, name: str, documentation: str, labels: dict[str, str]) -> Any:
        key = name, "".join(labels.values())
        if key not in self._metrics:
            if name not in self._families:
                self._families[name] = self._family_kinds(
                    name=name,
                    description=documentation,
                    kind=getattr(self._family_kinds, kind),
                )
            self._metrics[key] = self._families[name].Metric(labels={**self._labels, **labels})
        return self._metrics[key]


def _samples(
    definition: dict[str, Any], name: str, value: Any
) -> Iterator[tuple[str, dict[str, str], float]]:
    """Name, labels and value of everything that one metric is exposed as."""
    if definition["kind"] == "histogram":
        for bound, count in value["buckets"].items():
            yield f"{name}_bucket", {"le": bound}, count
        yield f"{name}_sum", {}, value["sum"]
        yield f"{name}_count", {}, value["count"]
    elif definition["label"] is not None:
        for label_value, part in value.items():
            yield name, {definition["label"]: label_value}, part
    else:
        yield name, {}, value
