"""Lines over a logarithmic axis, as SVG: one panel beside another, no library needed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 420, 300  # of a panel, in pixels
LEFT, RIGHT, TOP, BOTTOM = 52, 80, 30, 44
COLOURS = ("#777777", "#1f4e79", "#b3541e", "#1b6b3a")


@dataclass(frozen=True)
class Panel:
    title: str
    lines: dict[str, list[tuple[float, float]]]  # name to points, x > 0 and y >= 0
    unit: str = "%"  # of y: "%" of shares, which are at most 1; "": as it is


def svg(panels: Sequence[Panel], x_label: str, y_label: str) -> str:
    """The picture as text; lines of the same name have the same colour in every panel."""
    width = WIDTH * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" '
        f'width="{width}" height="{HEIGHT}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{HEIGHT}" fill="white"/>',
    ]
    for index, panel in enumerate(panels):
        parts.append(f'<g transform="translate({index * WIDTH} 0)">')
        parts += _Axes(panel).draw(panel, x_label, y_label)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


class _Axes:
    """Where a panel's values lie in pixels."""

    def __init__(self, panel: Panel) -> None:
        xs = [x for points in panel.lines.values() for x, _ in points]
        ys = [y for points in panel.lines.values() for _, y in points]
        self.low = math.log10(min(xs))
        self.decades = max(math.log10(max(xs)) - self.low, 1e-9)
        self.step = 0.1 if panel.unit == "%" else _round_step(max(ys) / 5)
        self.scale = 100 if panel.unit == "%" else 1
        self.unit = f" {panel.unit}".rstrip()
        self.top = max(1, math.ceil(round(max(ys) / self.step, 6))) * self.step

    def x(self, value: float) -> float:
        share = (math.log10(value) - self.low) / self.decades
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - value / self.top * (HEIGHT - TOP - BOTTOM)

    def draw(self, panel: Panel, x_label: str, y_label: str) -> list[str]:
        parts = [_text(LEFT, TOP - 12, panel.title, "start", 'font-weight="bold"')]
        parts += self._grid()
        middle = (LEFT + WIDTH - RIGHT) / 2
        parts.append(_text(middle, HEIGHT - 8, x_label, "middle"))
        height = (TOP + HEIGHT - BOTTOM) / 2
        parts.append(_text(14, height, y_label, "middle", f'transform="rotate(-90 14 {height})"'))
        label_y = -math.inf
        names = sorted(panel.lines, key=lambda name: -panel.lines[name][-1][1])
        for name in names:
            points = panel.lines[name]
            colour = COLOURS[list(panel.lines).index(name) % len(COLOURS)]
            path = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
            parts.append(
                f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>'
            )
            # Where lines end together their names would lie on each other.
            label_y = max(self.y(points[-1][1]) + 4, label_y + 13)
            parts.append(_text(WIDTH - RIGHT + 6, label_y, name, "start", f'fill="{colour}"'))
        return parts

    def _grid(self) -> list[str]:
        parts = []
        for count in range(round(self.top / self.step) + 1):
            y = self.y(count * self.step)
            parts.append(_line(LEFT, y, WIDTH - RIGHT, y))
            label = f"{round(count * self.step * self.scale, 6):g}{self.unit}"
            parts.append(_text(LEFT - 6, y + 4, label, "end"))
        highest = self.low + self.decades
        for exponent in range(math.floor(self.low), math.ceil(highest) + 1):
            for digit in (1, 3):
                value = digit * 10.0**exponent
                if self.low - 1e-9 <= math.log10(value) <= highest + 1e-9:
                    parts.append(_line(self.x(value), TOP, self.x(value), HEIGHT - BOTTOM))
                    parts.append(
                        _text(self.x(value), HEIGHT - BOTTOM + 15, f"{value:,.0f}", "middle")
                    )
        return parts


def _round_step(step: float) -> float:
    """The next one of 1, 2 and 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(max(step, 1e-9)))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step)


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="#dddddd" stroke-width="0.8"/>'


def _text(x: float, y: float, text: str, anchor: str, extra: str = "") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {extra}>{escape(text)}</text>'
    ).replace(" >", ">")
