"""Geometry of the Pareto plot: where points, ticks, labels and limits stand, in SVG units.

Both axes are chosen from the points; the vertical one is logarithmic. Labels take the first of a few places around
their point that covers neither another label nor another point, so the same report gives the same picture.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tqtool.rendering.figures import figure
from tqtool.report import Row

WIDTH, HEIGHT = 460, 320
LEFT, RIGHT, TOP, BOTTOM = 52, 446, 30, 278  # the plotting area
LETTER, LINE = 6.9, 13  # what a label's letter and line are taken to measure
RADIUS = 5


@dataclass(frozen=True, slots=True)
class Mark:
    """A tick or a limit: its position on one axis and its label."""

    at: float
    label: str


@dataclass(frozen=True, slots=True)
class Point:
    """One configuration."""

    x: float
    y: float
    low: float  # ends of the 95 % interval; equal to y where there is none
    high: float
    config: str
    baseline: bool
    hollow: bool  # another configuration is at least as good in everything plotted and costs no more
    label_x: float
    label_y: float
    anchor: str
    tip: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot: a metric against bits per value."""

    metric: str
    title: str
    points: tuple[Point, ...]
    x_ticks: tuple[Mark, ...]
    y_ticks: tuple[Mark, ...]
    limits: tuple[Mark, ...]


def pareto_panel(rows: Sequence[Row], metric: str, title: str, limits: Sequence[tuple[str, float]]) -> Panel | None:
    """Return the panel, or None where fewer than two rows have a positive value to plot."""
    shown = [row for row in rows if metric in row.metrics and row.metrics[metric].mean > 0]
    if len(shown) < 2:
        return None
    bits = [row.bits_per_value for row in shown]
    x_low, x_high = math.floor(2 * min(bits) - 0.5) / 2, math.ceil(2 * max(bits) + 0.5) / 2
    values = [row.metrics[metric].mean for row in shown]
    inside = [(name, x) for name, x in limits if min(values) / 4 < x < max(values) * 4]
    edges = [*values, *(x for _, x in inside)]
    y_low, y_high = math.log(min(edges) / 1.6), math.log(max(edges) * 1.6)

    def across(x: float) -> float:
        return round(LEFT + (x - x_low) / (x_high - x_low) * (RIGHT - LEFT), 1)

    def up(y: float) -> float:
        share = (math.log(max(y, 1e-300)) - y_low) / (y_high - y_low)
        return round(BOTTOM - min(max(share, 0.0), 1.0) * (BOTTOM - TOP), 1)

    places = [(across(row.bits_per_value), up(row.metrics[metric].mean)) for row in shown]
    labels = _place_labels([row.config for row in shown], places)
    points = []
    for row, (x, y), (label_x, label_y, anchor) in zip(shown, places, labels, strict=True):
        summary = row.metrics[metric]
        has_ci = not math.isnan(summary.ci_low)
        tip = f"{row.config}: {row.bits_per_value:.2f} bits per value, {title} {figure(summary.mean, metric)}"
        tip += f" (95 % {figure(summary.ci_low, metric)}–{figure(summary.ci_high, metric)})" if has_ci else ""
        low, high = (up(summary.ci_low), up(summary.ci_high)) if has_ci else (y, y)
        baseline = row.kind == "baseline"
        points.append(Point(x, y, low, high, row.config, baseline, not row.pareto, label_x, label_y, anchor, tip))
    return Panel(
        metric=metric,
        title=title,
        points=tuple(points),
        x_ticks=tuple(Mark(across(x), f"{x:g}") for x in linear_ticks(x_low, x_high)),
        y_ticks=tuple(Mark(up(y), f"{y:g}") for y in log_ticks(math.exp(y_low), math.exp(y_high))),
        limits=tuple(Mark(up(x), f"{name} {x:g}") for name, x in inside),
    )


def linear_ticks(low: float, high: float) -> list[float]:
    """Return four to nine round numbers within low..high."""
    step = next(s for s in (0.5, 1, 2, 5, 10, 20, 50, 100) if (high - low) / s <= 8)
    return [step * i for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times the powers of ten within low..high, or the powers alone where that is enough."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1,) if math.log10(high / low) > 3 else (1, 2, 5)
    return [float(f"{f}e{d}") for d in decades for f in factors if low <= f * 10.0**d <= high]


def _place_labels(names: Sequence[str], places: Sequence[tuple[float, float]]) -> list[tuple[float, float, str]]:
    """Return position and anchor of each label."""
    taken = [(x - RADIUS, y - RADIUS, x + RADIUS, y + RADIUS) for x, y in places]
    chosen = []
    for name, (x, y) in zip(names, places, strict=True):
        width = LETTER * len(name)
        gap = RADIUS + 4
        candidates = [
            (x + gap, y + 4, "start", (x + gap, y - 7, x + gap + width, y + 6)),
            (x - gap, y + 4, "end", (x - gap - width, y - 7, x - gap, y + 6)),
            (x, y - gap, "middle", (x - width / 2, y - gap - 10, x + width / 2, y - gap + 3)),
            (x, y + gap + 9, "middle", (x - width / 2, y + gap - 2, x + width / 2, y + gap + LINE)),
            (x + gap, y - gap, "start", (x + gap, y - gap - 11, x + gap + width, y - gap + 2)),
            (x + gap, y + gap + 9, "start", (x + gap, y + gap - 2, x + gap + width, y + gap + 11)),
            (x - gap, y - gap, "end", (x - gap - width, y - gap - 11, x - gap, y - gap + 2)),
            (x - gap, y + gap + 9, "end", (x - gap - width, y + gap - 2, x - gap, y + gap + 11)),
        ]

        def cost(box: tuple[float, float, float, float]) -> float:
            outside = (
                max(0.0, LEFT - box[0]) + max(0.0, box[2] - WIDTH) + max(0.0, TOP - box[1]) + max(0.0, box[3] - BOTTOM)
            )
            return sum(_overlap(box, other) for other in taken) + 20 * outside

        best = min(range(len(candidates)), key=lambda i: (cost(candidates[i][3]), i))
        label_x, label_y, anchor, box = candidates[best]
        taken.append(box)
        chosen.append((round(label_x, 1), round(label_y, 1), anchor))
    return chosen


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> float:
    """Return the area two boxes share."""
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
