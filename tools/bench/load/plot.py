"""Latencies of load, drawn."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.tools.bench.line_plot import Panel, svg
from octavo.tools.bench.load.report import LATENCIES, LoadResult, summary


def picture(results: Sequence[LoadResult]) -> str:
    """As SVG: of several rates the percentiles against them, of one run how many took how long."""
    if len(results) > 1:
        return svg(_against_rates(results), "requests a second", "milliseconds")
    return svg(_shares(results[0]), "milliseconds", "requests, or tokens, not above it")


def _against_rates(results: Sequence[LoadResult]) -> list[Panel]:
    panels = []
    for name in ("ttft", "tpot"):
        lines: dict[str, list[tuple[float, float]]] = {"p50": [], "p95": [], "p99": []}
        for result in results:
            figures = summary(result.latencies(name))
            if figures is not None:
                for share, points in lines.items():
                    points.append((result.plan.request_rate, figures[share]))
        panels.append(Panel(LATENCIES[name], lines, unit=""))
    return panels


def _shares(result: LoadResult) -> list[Panel]:
    panels = []
    for name in ("ttft", "itl"):
        values = sorted(1000 * value for value in result.latencies(name))
        points = [
            (max(value, 0.001), (rank + 1) / len(values)) for rank, value in enumerate(values)
        ]
        step = max(1, len(points) // 200)
        panels.append(Panel(LATENCIES[name], {"": [*points[::step], *points[-1:]]}))
    return panels
