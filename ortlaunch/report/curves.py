"""A chart as inline SVG: a line for each run over the steps, with the values under the pointer. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from ortlaunch.report.markup import Html, tag
from ortlaunch.report.style import LIGHT

WIDTH, HEIGHT = 520, 250
LEFT, RIGHT, TOP, BOTTOM = 62, 10, 10, 26
_BUCKETS = 400  # the least and the greatest value of each are drawn: no spike gets lost
_STRIPS = 100  # places under the pointer
_DOTS = 40  # so few points are drawn as dots, too
_SPREAD = 50  # a greatest value so many times the median wants a logarithmic scale

Point = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """The values of one run; None where one is infinite, undefined or missing."""

    run: str
    number: int
    points: Sequence[tuple[float, float | None]]
    starts: Sequence[int] = ()

    @property
    def finite(self) -> list[Point]:
        """What can be drawn."""
        return [(x, y) for x, y in self.points if y is not None]

    @property
    def gaps(self) -> list[float]:
        """Steps whose value cannot be drawn."""
        return [x for x, y in self.points if y is None]


@dataclass(frozen=True)
class Scale:
    """A range of values on a range of pixels."""

    low: float
    high: float
    first: float
    last: float
    logarithmic: bool = False

    def at(self, value: float) -> float:
        """The pixel of a value."""
        low, high, value = (_log(v) if self.logarithmic else v for v in (self.low, self.high, value))
        return round(self.first + (value - low) / (high - low or 1.0) * (self.last - self.first), 1)


def chart(title: str, curves: Sequence[Curve], from_zero: bool = False) -> Html | None:
    """A card with one chart; None where no run has a value.

    Args:
        from_zero: whether the axis of values begins at 0.
    """
    drawn = [curve for curve in curves if curve.finite]
    if not drawn:
        return None
    across, up = _scales(drawn, from_zero)
    pieces = [*_axes(across, up), *_starts(drawn, across)]
    pieces += [piece for curve in drawn for piece in _lines(curve, across, up)]
    pieces += _strips(drawn, across, up)
    said = f"{title} (logarithmic)" if up.logarithmic else title
    picture = tag("svg", *pieces, class_="chart", viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=said)
    return tag("div", tag("h3", said), picture, *_lost(curves), class_="card")


def swatch(number: int) -> Html:
    """The line of a run, for the legend."""
    return tag("svg", tag("path", d="M0 4H26", **_stroke(number)), viewBox="0 0 26 8", class_="chart")


def number(value: float) -> str:
    """A value as a person reads it, short enough to stand before an axis: 1.5e-4, not 0.00015."""
    if 0 < abs(value) < 1e-3:
        mantissa, exponent = f"{value:.3e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from low to high."""
    raw = (high - low) / about or abs(high) or 1.0
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(each * step, 12) for each in range(first, last + 1)]


def _log(value: float) -> float:
    return math.log10(max(value, 1e-300))


def _scales(curves: Sequence[Curve], from_zero: bool) -> tuple[Scale, Scale]:
    xs = [x for curve in curves for x, _ in curve.points]
    ys = [y for curve in curves for _, y in curve.finite]
    low, high = (min(0.0, *ys) if from_zero else min(ys)), max(ys)
    wide = not from_zero and low > 0 and high > _SPREAD * statistics.median(ys)
    if low == high:
        low, high = low - abs(low) * 0.1 - (low == 0), high + abs(high) * 0.1 + (high == 0)
    elif not wide:
        room = (high - low) * 0.05
        low, high = (low if low == 0 and from_zero else low - room), high + room
    across = Scale(min(0, *xs), max(xs), LEFT, WIDTH - RIGHT)
    return across, Scale(low, high, HEIGHT - BOTTOM, TOP, wide)


def _axes(across: Scale, up: Scale) -> Iterator[Html]:
    for value in _decades(up) if up.logarithmic else ticks(up.low, up.high):
        y = up.at(value)
        yield tag("path", d=f"M{LEFT} {y}H{WIDTH - RIGHT}", class_="axis")
        yield tag("text", number(value), x=LEFT - 7, y=y + 4, text_anchor="end")
    for value in ticks(across.low, across.high, 4):
        if value == int(value):
            end = across.at(value) > WIDTH - RIGHT - 12
            yield tag("text", number(value), x=across.at(value), y=HEIGHT - 8, text_anchor="end" if end else "middle")


def _decades(up: Scale) -> list[float]:
    inside = [10.0**power for power in range(math.ceil(_log(up.low)), math.floor(_log(up.high)) + 1)]
    return inside if len(inside) >= 2 else [up.low, up.high]


def _starts(curves: Sequence[Curve], across: Scale) -> Iterator[Html]:
    """Where a later start took the run up again."""
    for curve in curves:
        for step in curve.starts:
            about = tag("title", f"{curve.run}: a later start went on after step {step}")
            line = f"M{across.at(step)} {TOP}V{HEIGHT - BOTTOM}"
            yield tag("path", about, d=line, stroke=_color(curve.number), stroke_dasharray="2 4", class_="curve")


def _lines(curve: Curve, across: Scale, up: Scale) -> Iterator[Html]:
    for whole, group in groupby(curve.points, key=lambda point: point[1] is not None):
        points = [(x, y) for x, y in group if y is not None]
        if whole:
            path = "L".join(f"{across.at(x)} {up.at(y)}" for x, y in thinned(points))
            yield tag("path", d=f"M{path}", class_="curve", **_stroke(curve.number))
    if len(curve.finite) <= _DOTS:
        for x, y in curve.finite:
            yield tag("circle", cx=across.at(x), cy=up.at(y), r=2.6, fill=_color(curve.number))


def thinned(points: Sequence[Point]) -> list[Point]:
    """The least and the greatest value of each of so many pieces, in their order; few points as they are."""
    if len(points) <= 2 * _BUCKETS:
        return list(points)
    size = math.ceil(len(points) / _BUCKETS)
    pieces = [points[at : at + size] for at in range(0, len(points), size)]
    ends = [{min(piece, key=lambda p: p[1]), max(piece, key=lambda p: p[1])} for piece in pieces]
    return sorted({points[0], points[-1], *(point for pair in ends for point in pair)})


def _strips(curves: Sequence[Curve], across: Scale, up: Scale) -> Iterator[Html]:
    """Transparent strips whose title, shown under the pointer, is each run's value there."""
    steps = sorted({x for curve in curves for x, _ in curve.finite})
    steps = steps[:: math.ceil(len(steps) / _STRIPS)]
    values = [dict(curve.finite) for curve in curves]
    middles = [(across.at(a) + across.at(b)) / 2 for a, b in zip(steps, steps[1:])]
    for step, left, right in zip(steps, [LEFT, *middles], [*middles, WIDTH - RIGHT]):
        here = [(curve, found[step]) for curve, found in zip(curves, values) if step in found]
        said = "\n".join([f"step {number(step)}", *(f"{curve.run}: {_exact(value)}" for curve, value in here)])
        x = across.at(step)
        dots = [tag("circle", cx=x, cy=up.at(value), r=3.5, fill=_color(curve.number)) for curve, value in here]
        hit = tag(
            "rect", x=left, y=TOP, width=round(max(right - left, 0.1), 1), height=HEIGHT - TOP - BOTTOM, class_="hit"
        )
        line = tag("path", d=f"M{x} {TOP}V{HEIGHT - BOTTOM}", class_="cursor")
        yield tag("g", tag("title", said), hit, line, *dots, class_="at")


def _lost(curves: Sequence[Curve]) -> Iterator[Html]:
    """What the lines do not show, in words."""
    for curve in curves:
        if curve.gaps:
            steps = ", ".join(number(step) for step in curve.gaps[:5]) + (", ..." if len(curve.gaps) > 5 else "")
            yield tag("p", f"{curve.run}: no finite value at step {steps}", class_="warn")


def _exact(value: float) -> str:
    return f"{value:,.6g}"


def _color(number: int) -> str:
    return f"var(--run{number % len(LIGHT)})"


def _stroke(number: int) -> dict[str, str]:
    """Solid lines for the first runs, dashed ones for those that have the same colour."""
    dashes = {"stroke_dasharray": "7 4"} if number >= len(LIGHT) else {}
    return {"stroke": _color(number), "stroke_width": "1.8", **dashes}
