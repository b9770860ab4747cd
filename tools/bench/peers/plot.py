"""Draws bars from JSON on standard input: `python -P plot.py OUTPUT`; needs only matplotlib."""

from __future__ import annotations

import json
import sys
from typing import Any

import matplotlib  # type: ignore[import-not-found]

matplotlib.use("Agg")
from matplotlib import pyplot

# Colours by precision, that of Octavo first: told apart by lightness as well as by hue.
COLOURS = {
    "fp32": ("#1f4e79", "#a9c4de"),
    "int8": ("#1b6b3a", "#a8d5b5"),
    "int4": ("#8a4b08", "#ecc794"),
}


def draw(content: dict[str, Any], output: str) -> None:
    """One panel a scenario, one bar an engine, with a line from its least to its greatest value."""
    pyplot.rcParams.update({"svg.hashsalt": "octavo", "font.size": 8, "svg.fonttype": "none"})
    panels = list(dict.fromkeys(bar["panel"] for bar in content["bars"]))
    engines = len({bar["engine"] for bar in content["bars"]})
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(3.2 * len(panels), 1.2 + 0.24 * engines), squeeze=False
    )
    for axis, panel in zip(axes[0], panels, strict=True):
        bars = [bar for bar in content["bars"] if bar["panel"] == panel][::-1]
        middle = [bar["median"] for bar in bars]
        errors = [
            [bar["median"] - bar["low"] for bar in bars],
            [bar["high"] - bar["median"] for bar in bars],
        ]
        colours = [COLOURS[bar["precision"]][0 if bar["ours"] else 1] for bar in bars]
        names = [bar["engine"] for bar in bars]
        drawn = axis.barh(names, middle, xerr=errors, color=colours, error_kw={"linewidth": 0.8})
        axis.bar_label(drawn, labels=[f" {value:.0f}" for value in middle], fontsize=7)
        axis.set_title(panel, fontsize=8)
        axis.margins(x=0.18)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{content['title']} (for milliseconds, less is better)", fontsize=9)
    figure.tight_layout()
    figure.savefig(output, metadata={"Date": None} if output.endswith(".svg") else None)


if __name__ == "__main__":
    draw(json.load(sys.stdin), sys.argv[1])
