"""Figures of a run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.tools import console
from octavo.tools.bench.load.plan import LoadPlan
from octavo.tools.bench.load.records import Record

if TYPE_CHECKING:
    from rich.table import Table

PERCENTILES = (50, 90, 95, 99)
# Shares of one core, or of the mean time between arrivals, above which the client is in the way.
_BUSY_CLIENT = 0.7
LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2e": "end to end",
}


@dataclass(frozen=True)
class LoadResult:
    """duration, client_cpu: seconds, of the measured requests together."""

    plan: LoadPlan
    records: tuple[Record, ...]
    duration: float
    client_cpu: float

    @property
    def finished(self) -> list[Record]:
        return [record for record in self.records if record.outcome == "finished"]

    @property
    def output_throughput(self) -> float:
        """Tokens a second, those of requests that were left or failed included."""
        return sum(record.num_tokens for record in self.records) / self.duration

    def latencies(self, name: str) -> list[float]:
        """Of the finished requests, seconds; "itl" of each of their tokens."""
        if name == "itl":
            return [gap for record in self.finished for gap in record.gaps]
        return [getattr(record, name) for record in self.finished]

    @property
    def num_good(self) -> int:
        """Finished requests that kept every objective."""
        wanted = self.plan.objectives
        return sum(
            record.ttft <= wanted.ttft and record.tpot <= wanted.tpot and record.e2e <= wanted.e2e
            for record in self.finished
        )

    def as_json(self) -> dict[str, Any]:
        outcomes = Counter(record.outcome for record in self.records)
        plan = asdict(self.plan)
        del plan["api_key"], plan["prompts"], plan["objectives"]
        plan["request_rate"] = _number(self.plan.request_rate)
        wanted = asdict(self.plan.objectives).items()
        return {
            "plan": plan,
            "duration_s": self.duration,
            "requests": {
                name: outcomes[name] for name in ("finished", "refused", "left", "failed")
            },
            "errors": dict(
                Counter(str(record.error) for record in self.records if record.outcome == "failed")
            ),
            "request_throughput": len(self.finished) / self.duration,
            "output_throughput": self.output_throughput,
            "objectives_s": {name: value for name, value in wanted if math.isfinite(value)},
            "goodput": {
                "requests_per_s": self.num_good / self.duration,
                "share": self.num_good / len(self.records),
            },
            "latency_ms": {name: summary(self.latencies(name)) for name in LATENCIES},
            "client": {
                "lag_ms": summary([record.sent - record.intended for record in self.records]),
                "cpu_share": self.client_cpu / self.duration,
            },
        }

    @property
    def warning(self) -> str | None:
        """Where the figures may tell of the client rather than of the server."""
        if self.client_cpu > _BUSY_CLIENT * self.duration:
            return (
                f"the client used {self.client_cpu / self.duration:.0%} of a core: its own figures "
                "may be what limits these, use a lower rate or another machine"
            )
        return None


def summary(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean and percentiles in milliseconds; None of nothing. A percentile is a value that occurred:
    at least that share of all is not above it."""
    if not seconds:
        return None
    values = np.array(seconds) * 1000
    percentiles = np.percentile(values, PERCENTILES, method="inverted_cdf").tolist()
    named = {f"p{share}": value for share, value in zip(PERCENTILES, percentiles, strict=True)}
    return {"mean": float(values.mean()), **named, "max": float(values.max())}


def tables(results: Sequence[LoadResult]) -> list[Table]:
    """Of one run, or of several at different rates."""
    overview = console.table(
        "Load",
        "requests/s",
        "finished>",
        "refused>",
        "left>",
        "failed>",
        "tokens/s>",
        "good>",
    )
    latencies = console.table(
        "Latency, ms", "requests/s", "", "mean>", *(f"p{p}>" for p in PERCENTILES)
    )
    for result in results:
        figures = result.as_json()
        rate = _load(result.plan)
        counts = figures["requests"]
        overview.add_row(
            rate,
            *(str(counts[name]) for name in ("finished", "refused", "left", "failed")),
            f"{result.output_throughput:.1f}",
            f"{figures['goodput']['share']:.0%}",
        )
        for name, title in LATENCIES.items():
            found = figures["latency_ms"][name]
            if found is not None:
                shown = [found["mean"], *(found[f"p{share}"] for share in PERCENTILES)]
                latencies.add_row(rate, title, *(f"{value:.1f}" for value in shown))
    return [overview, latencies]


def _load(plan: LoadPlan) -> str:
    if plan.concurrency is not None:
        return f"{plan.concurrency} at once"
    return f"{plan.request_rate:g}" if math.isfinite(plan.request_rate) else "all at once"


def _number(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None
