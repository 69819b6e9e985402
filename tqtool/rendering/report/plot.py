"""Geometry of the Pareto plot: where points, ticks, labels and limits stand, in SVG units.

Both axes are logarithmic and chosen from the points. A label takes the first of a few places around its point that
covers least of other labels, points and intervals, so the same report gives the same picture.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from tqtool.rendering.report import figures
from tqtool.report.model import Row

LEFT, TOP = 52, 30  # of the plotting area
MARGIN_RIGHT, MARGIN_BOTTOM = 14, 42
CROWDED = 10  # more points are drawn in a panel twice as wide
LETTER, LINE = 6.6, 13  # what a label's letter and line are taken to measure
RADIUS = 5
LEAST, MOST = 1e-12, 1e12  # what lies outside is exact, or nonsense that would flatten the rest
MOST_BITS = 100

Box = tuple[float, float, float, float]  # left, top, right, bottom
Anchor = Literal["start", "middle", "end"]


@dataclass(frozen=True, slots=True)
class Tick:
    """A position on one axis and its label."""

    at: float
    label: str


@dataclass(frozen=True, slots=True)
class LimitLine:
    """A horizontal line and where its label stands."""

    at: float
    label: str
    label_x: float
    label_y: float
    anchor: Anchor


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
    anchor: Anchor
    name: str  # all of it in words, for screen readers
    tip: str  # its numbers, shown while the pointer or the focus is on it


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot: a metric against bits per value."""

    metric: str
    title: str
    width: int
    height: int
    right: int  # ends of the plotting area
    bottom: int
    points: tuple[Point, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    limits: tuple[LimitLine, ...]


def pareto_panel(rows: Sequence[Row], metric: str, title: str, limits: Sequence[tuple[str, float]]) -> Panel | None:
    """Return the panel, or None where fewer than two rows have a positive value to plot."""
    shown = [row for row in rows if LEAST < _mean(row, metric) < MOST and 0 < row.bits_per_value <= MOST_BITS]
    if len(shown) < 2:
        return None
    width, height = (940, 400) if len(shown) > CROWDED else (460, 320)
    right, bottom = width - MARGIN_RIGHT, height - MARGIN_BOTTOM
    x_low, x_high = _range([row.bits_per_value for row in shown], 1.12)
    values = [_mean(row, metric) for row in shown]
    inside = [(name, x) for name, x in limits if min(values) / 4 < x < max(values) * 4]
    y_low, y_high = _range([*values, *(x for _, x in inside)], 1.6)

    def across(x: float) -> float:
        return round(LEFT + (math.log10(x) - x_low) / (x_high - x_low) * (right - LEFT), 1)

    def up(y: float) -> float:
        share = (math.log10(max(y, LEAST)) - y_low) / (y_high - y_low)
        return round(bottom - min(max(share, 0.0), 1.0) * (bottom - TOP), 1)

    area = (LEFT, TOP, width, bottom)
    places = [(across(row.bits_per_value), up(_mean(row, metric))) for row in shown]
    spans = [_span(row, metric, y, up) for row, (_, y) in zip(shown, places, strict=True)]
    taken = [(x - RADIUS, y - RADIUS, x + RADIUS, y + RADIUS) for x, y in places]
    taken += [(x - 3, high, x + 3, low) for (x, _), (low, high) in zip(places, spans, strict=True)]
    lines = [_limit(f"{name} {x:g}", up(x), right, area, taken) for name, x in inside]
    points = []
    for row, (x, y), (low, high) in zip(shown, places, spans, strict=True):
        label = _label(row.config, x, y, area, taken)
        baseline = row.kind == "baseline"
        points.append(Point(x, y, low, high, row.config, baseline, not row.pareto, *label, *_words(row, metric, title)))
    return Panel(
        metric=metric,
        title=title,
        width=width,
        height=height,
        right=right,
        bottom=bottom,
        points=tuple(points),
        x_ticks=tuple(Tick(across(x), f"{x:g}") for x in _bit_ticks(10**x_low, 10**x_high)),
        y_ticks=tuple(Tick(up(y), f"{y:g}") for y in log_ticks(10**y_low, 10**y_high)),
        limits=tuple(lines),
    )


def log_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times the powers of ten within low..high, or the powers alone where that is enough."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1,) if math.log10(high / low) > 3 else (1, 2, 5)
    return [float(f"{f}e{d}") for d in decades for f in factors if low <= f * 10.0**d <= high]


def _bit_ticks(low: float, high: float) -> list[float]:
    """Return the whole bits within low..high, with halves where there are few, with gaps where there are many."""
    step = 0.5 if high - low < 4 else 1.0
    ticks = [step * i for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return ticks if len(ticks) <= 12 else [tick for tick in ticks if math.log2(tick).is_integer()]


def _mean(row: Row, metric: str) -> float:
    return figures.summary(row, metric).mean


def _range(values: Sequence[float], margin: float) -> tuple[float, float]:
    """Return the decimal logarithms of the ends of an axis that holds the values with a margin (a factor)."""
    return math.log10(min(values) / margin), math.log10(max(values) * margin)


def _span(row: Row, metric: str, y: float, up: Callable[[float], float]) -> tuple[float, float]:
    summary = figures.summary(row, metric)
    return (up(summary.ci_low), up(summary.ci_high)) if summary.ci_low > 0 else (y, y)


def _words(row: Row, metric: str, title: str) -> tuple[str, str]:
    bits, mean, interval = f"{row.bits_per_value:.2f}", figures.mean_text(row, metric), figures.ci_text(row, metric)
    name = f"{row.config}: {bits} bits per value, {title} {mean}" + (f", 95 % {interval}" if interval else "")
    return name, f"{row.config}: {bits} bits, {mean}" + (f" ({interval})" if interval else "")


def _limit(label: str, at: float, right: int, area: Box, taken: list[Box]) -> LimitLine:
    """Return the line with its label at the end and on the side where it covers least."""
    width = LETTER * len(label)
    candidates: list[tuple[float, float, Anchor, Box]] = [
        (right - 2, at - 4, "end", (right - 2 - width, at - 14, right, at)),
        (right - 2, at + 12, "end", (right - 2 - width, at, right, at + 14)),
        (LEFT + 2, at - 4, "start", (LEFT, at - 14, LEFT + 2 + width, at)),
        (LEFT + 2, at + 12, "start", (LEFT, at, LEFT + 2 + width, at + 14)),
    ]
    return LimitLine(at, label, *_best(candidates, area, taken))


def _label(name: str, x: float, y: float, area: Box, taken: list[Box]) -> tuple[float, float, Anchor]:
    """Return position and anchor of a point's label."""
    width = LETTER * len(name)
    candidates: list[tuple[float, float, Anchor, Box]] = []
    for gap in (RADIUS + 4, RADIUS + 14):
        for dy, top in ((4, -7), (-gap, -gap - 11), (gap + 9, gap - 2)):
            candidates.append((x + gap, y + dy, "start", (x + gap, y + top, x + gap + width, y + top + LINE)))
            candidates.append((x - gap, y + dy, "end", (x - gap - width, y + top, x - gap, y + top + LINE)))
            if dy != 4:
                candidates.append((x, y + dy, "middle", (x - width / 2, y + top, x + width / 2, y + top + LINE)))
    return _best(candidates, area, taken)


def _best(
    candidates: Sequence[tuple[float, float, Anchor, Box]], area: Box, taken: list[Box]
) -> tuple[float, float, Anchor]:
    """Return the first place that covers least of what is taken, and take it."""

    def cost(box: Box) -> float:
        outside = max(0.0, area[0] - box[0]) + max(0.0, area[1] - box[1])
        outside += max(0.0, box[2] - area[2]) + max(0.0, box[3] - area[3])
        return sum(_overlap(box, other) for other in taken) + 20 * outside

    x, y, anchor, box = min(candidates, key=lambda place: cost(place[3]))
    taken.append(box)
    return round(x, 1), round(y, 1), anchor


def _overlap(a: Box, b: Box) -> float:
    """Return the area two boxes share."""
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
