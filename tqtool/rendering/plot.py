"""Geometry of the Pareto plot: where points, ticks, labels and limits stand, in SVG units.

Both axes are chosen from the points; the vertical one is logarithmic. Labels take the first of a few places around
their point that covers neither another label nor another point, so the same report gives the same picture.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tqtool.rendering import figures
from tqtool.report import Row

WIDTH, HEIGHT = 460, 320
LEFT, RIGHT, TOP, BOTTOM = 52, 446, 30, 278  # the plotting area
LETTER, LINE = 6.9, 13  # what a label's letter and line are taken to measure
RADIUS = 5


LEAST, MOST = 1e-12, 1e12  # what lies outside is exact, or nonsense that would flatten the rest
MOST_BITS = 100

Box = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass(frozen=True, slots=True)
class Tick:
    """A position on one axis and its label."""

    at: float
    label: str


@dataclass(frozen=True, slots=True)
class Limit:
    """A horizontal line and where its label stands."""

    at: float
    label: str
    label_x: float
    label_y: float
    anchor: str


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
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    limits: tuple[Limit, ...]


def pareto_panel(rows: Sequence[Row], metric: str, title: str, limits: Sequence[tuple[str, float]]) -> Panel | None:
    """Return the panel, or None where fewer than two rows have a positive value to plot."""
    shown = [
        row for row in rows if LEAST < figures.summary(row, metric).mean < MOST and 0 <= row.bits_per_value <= MOST_BITS
    ]
    if len(shown) < 2:
        return None
    bits = [row.bits_per_value for row in shown]
    x_low, x_high = math.floor(2 * min(bits) - 0.5) / 2, math.ceil(2 * max(bits) + 0.5) / 2
    values = [row.metrics[metric].mean for row in shown]
    inside = [(name, x) for name, x in limits if min(values) / 4 < x < max(values) * 4]
    edges = [*values, *(x for _, x in inside)]
    y_low, y_high = math.log10(min(edges) / 1.6), math.log10(max(edges) * 1.6)

    def across(x: float) -> float:
        return round(LEFT + (x - x_low) / (x_high - x_low) * (RIGHT - LEFT), 1)

    def up(y: float) -> float:
        share = (math.log10(max(y, LEAST)) - y_low) / (y_high - y_low)
        return round(BOTTOM - min(max(share, 0.0), 1.0) * (BOTTOM - TOP), 1)

    places = [(across(row.bits_per_value), up(row.metrics[metric].mean)) for row in shown]
    spans = [
        (up(row.metrics[metric].ci_low), up(row.metrics[metric].ci_high)) if row.metrics[metric].ci_low > 0 else (y, y)
        for row, (_, y) in zip(shown, places, strict=True)
    ]
    taken = [
        (x - RADIUS, min(high, y - RADIUS), x + RADIUS, max(low, y + RADIUS))
        for (x, y), (low, high) in zip(places, spans, strict=True)
    ]
    lines = [_limit(f"{name} {x:g}", up(x), taken) for name, x in inside]
    labels = [_label(row.config, x, y, taken) for row, (x, y) in zip(shown, places, strict=True)]
    points = []
    for row, (x, y), (low, high), (label_x, label_y, anchor) in zip(shown, places, spans, labels, strict=True):
        interval = figures.ci_text(row, metric)
        tip = f"{row.config}: {row.bits_per_value:.2f} bits per value, {title} {figures.mean_text(row, metric)}"
        tip += f" (95 % {interval})" if interval else ""
        points.append(
            Point(x, y, low, high, row.config, row.kind == "baseline", not row.pareto, label_x, label_y, anchor, tip)
        )
    return Panel(
        metric=metric,
        title=title,
        points=tuple(points),
        x_ticks=tuple(Tick(across(x), f"{x:g}") for x in linear_ticks(x_low, x_high)),
        y_ticks=tuple(Tick(up(y), f"{y:g}") for y in log_ticks(10**y_low, 10**y_high)),
        limits=tuple(lines),
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


def _limit(label: str, at: float, taken: list[Box]) -> Limit:
    """Return the line with its label at the end and on the side where it covers least."""
    width = LETTER * len(label)
    candidates: list[tuple[float, float, str, Box]] = [
        (RIGHT - 2, at - 4, "end", (RIGHT - 2 - width, at - 14, RIGHT, at)),
        (RIGHT - 2, at + 12, "end", (RIGHT - 2 - width, at, RIGHT, at + 14)),
        (LEFT + 2, at - 4, "start", (LEFT, at - 14, LEFT + 2 + width, at)),
        (LEFT + 2, at + 12, "start", (LEFT, at, LEFT + 2 + width, at + 14)),
    ]
    return Limit(at, label, *_best(candidates, taken))


def _label(name: str, x: float, y: float, taken: list[Box]) -> tuple[float, float, str]:
    """Return position and anchor of a point's label."""
    width, gap = LETTER * len(name), RADIUS + 4
    candidates: list[tuple[float, float, str, Box]] = []
    for dy, top in ((4, -7), (-gap, -gap - 11), (gap + 9, gap - 2)):
        candidates.append((x + gap, y + dy, "start", (x + gap, y + top, x + gap + width, y + top + LINE)))
        candidates.append((x - gap, y + dy, "end", (x - gap - width, y + top, x - gap, y + top + LINE)))
        if dy != 4:
            candidates.append((x, y + dy, "middle", (x - width / 2, y + top, x + width / 2, y + top + LINE)))
    return _best(candidates, taken)


def _best(candidates: Sequence[tuple[float, float, str, Box]], taken: list[Box]) -> tuple[float, float, str]:
    """Return the first place that covers least of what is taken, and take it."""

    def cost(box: Box) -> float:
        outside = (
            max(0.0, LEFT - box[0]) + max(0.0, box[2] - WIDTH) + max(0.0, TOP - box[1]) + max(0.0, box[3] - BOTTOM)
        )
        return sum(_overlap(box, other) for other in taken) + 20 * outside

    x, y, anchor, box = min(candidates, key=lambda place: cost(place[3]))
    taken.append(box)
    return round(x, 1), round(y, 1), anchor


def _overlap(a: Box, b: Box) -> float:
    """Return the area two boxes share."""
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
