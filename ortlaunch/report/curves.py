"""Values of a chart: a line for each run over its steps, and its tooltips. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from ortlaunch.json_types import Json

# Pixels of a chart and of the part with the lines, and the colours of style.css.
AREA = {
    "width": 520,
    "height": 250,
    "left": 62,
    "right": 510,
    "top": 10,
    "bottom": 224,
    "colors": 8,
}
# Pieces that a long line is divided into. The smallest and the largest value of each are drawn, so that
# no spike gets lost; 400 is close to the width in pixels.
_BUCKETS = 400
# Maximum number of positions that show their values under the pointer.
_STRIPS = 100
# Up to this many points are also drawn as dots: a line alone would hide that they are few.
_DOTS = 40
# The scale is logarithmic where the largest value exceeds this many medians.
_SPREAD = 50

Point = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """The values of one run; None where one is infinite, undefined or missing."""

    run: str
    number: int
    points: Sequence[tuple[float, float | None]]
    starts: Sequence[int] = ()
    part: str = ""
    """Which of several values of the run it shows, such as `evaluation`, whose line is dotted."""

    @property
    def finite(self) -> list[Point]:
        """Points with a value."""
        return [(x, y) for x, y in self.points if y is not None]

    @property
    def gaps(self) -> list[float]:
        """Steps whose value is missing or not finite."""
        return [x for x, y in self.points if y is None]


@dataclass(frozen=True)
class Scale:
    """A linear or logarithmic map from a range of values to a range of pixels."""

    low: float
    high: float
    first: float
    last: float
    logarithmic: bool = False

    def at(self, value: float) -> float:
        """Return the pixel of a value."""
        low, high, value = (
            _log(v) if self.logarithmic else v for v in (self.low, self.high, value)
        )
        # A range of one value would divide by 0. Tenths of a pixel keep the page small.
        return round(self.first + (value - low) / (high - low or 1.0) * (self.last - self.first), 1)


def chart(
    title: str, curves: Sequence[Curve], from_zero: bool = False, is_share: bool = False
) -> dict[str, object] | None:
    """Return everything that page.html draws of one chart; None where no run has a value.

    Args:
        title: the chart's heading.
        curves: one or two for each run.
        from_zero: whether the axis of values begins at 0.
        is_share: whether no value lies below 0 or above 1.
    """
    drawn = [curve for curve in curves if curve.finite]
    if not drawn:
        return None
    across, up = _scales(drawn, from_zero, is_share)
    values = _decades(up) if up.logarithmic else ticks(up.low, up.high)
    steps = ticks(across.low, across.high, 4)
    return {
        "title": f"{title} (logarithmic)" if up.logarithmic else title,
        # Marks on the value axis, then on the axis of steps: (pixel, label).
        "rows": [(up.at(value), number(value)) for value in values],
        "columns": [(across.at(step), number(step)) for step in steps if step == int(step)],
        "curves": [_drawn(curve, across, up) for curve in drawn],
        "strips": list(_strips(drawn, across, up)),
        "parts": [part for part in dict.fromkeys(curve.part for curve in drawn) if part],
        "lost": list(_lost(curves)),
    }


def number(value: float) -> str:
    """Return a value in a short form for an axis: 1.5e-4 instead of 0.00015."""
    if 0 < abs(value) < 1e-3:
        mantissa, exponent = f"{value:.3e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return round numbers from low to high, about as many as `about`, for the marks of an axis."""
    raw = (high - low) / about or abs(high) or 1.0
    unit = 10.0 ** math.floor(math.log10(raw))
    # 0.999: rounding must not skip a factor that fits exactly.
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= raw * 0.999)
    # 1e-9: a bound that is a multiple of the step but for rounding keeps its mark.
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(each * step, 12) for each in range(first, last + 1)]


def _log(value: float) -> float:
    # The smallest positive double is about 1e-308: 0 and negative values get a finite logarithm.
    return math.log10(max(value, 1e-300))


def _scales(curves: Sequence[Curve], from_zero: bool, is_share: bool) -> tuple[Scale, Scale]:
    xs = [x for curve in curves for x, _ in curve.points]
    ys = [y for curve in curves for _, y in curve.finite]
    low = min(0.0, *ys) if from_zero else min(ys)
    high = max(ys)
    # Only positive values have a logarithm.
    wide = not from_zero and low > 0 and high > _SPREAD * statistics.median(ys)
    # A constant line is drawn in the middle: 10 % around its value, or from -1 to 1 for 0.
    if low == high:
        low = low - abs(low) * 0.1 - (low == 0)
        high = high + abs(high) * 0.1 + (high == 0)
    elif not wide:
        room = (high - low) * 0.05
        low = low if low == 0 and from_zero else low - room
        high = high + room
    if is_share:
        low, high = max(low, 0.0), min(high, 1.0)
    # SVG's y axis points down: the lowest value is at the bottom pixel, the larger number.
    across = Scale(min(0, *xs), max(xs), AREA["left"], AREA["right"])
    return across, Scale(low, high, AREA["bottom"], AREA["top"], wide)


def _decades(up: Scale) -> list[float]:
    inside = [
        10.0**power for power in range(math.ceil(_log(up.low)), math.floor(_log(up.high)) + 1)
    ]
    # Fewer than two powers of ten would make an axis without a scale: mark the ends instead.
    return inside if len(inside) >= 2 else [up.low, up.high]


def _drawn(curve: Curve, across: Scale, up: Scale) -> Json:
    """Return a run's lines, its dots if it has few points, and the steps of resumed starts."""
    # A step without a value interrupts the line.
    groups = groupby(curve.points, key=lambda point: point[1] is not None)
    lines = [[(x, y) for x, y in group if y is not None] for is_whole, group in groups if is_whole]
    return {
        "run": curve.run,
        "number": curve.number,
        "part": curve.part,
        "starts": [(step, across.at(step)) for step in curve.starts],
        "lines": [[(across.at(x), up.at(y)) for x, y in thinned(points)] for points in lines],
        "dots": [(across.at(x), up.at(y)) for x, y in curve.finite]
        if len(curve.finite) <= _DOTS
        else [],
    }


def thinned(points: Sequence[Point]) -> list[Point]:
    """Return the smallest and the largest point of each of `_BUCKETS` pieces, ordered by step.

    A short list of points is returned unchanged.
    """
    if len(points) <= 2 * _BUCKETS:
        return list(points)
    size = math.ceil(len(points) / _BUCKETS)
    pieces = [points[at : at + size] for at in range(0, len(points), size)]
    ends = [{min(piece, key=lambda p: p[1]), max(piece, key=lambda p: p[1])} for piece in pieces]
    # The set removes a point that is both, as in a constant piece.
    return sorted({points[0], points[-1], *(point for pair in ends for point in pair)})


def _strips(curves: Sequence[Curve], across: Scale, up: Scale) -> Iterator[dict[str, object]]:
    """Yield transparent strips whose titles, each run's value there, the browser shows as
    tooltips."""
    steps = sorted({x for curve in curves for x, _ in curve.finite})
    # Every n-th step, so that the page stays small.
    steps = steps[:: math.ceil(len(steps) / _STRIPS)]
    values = [dict(curve.finite) for curve in curves]
    # Adjacent strips meet halfway between their steps.
    middles = [(across.at(a) + across.at(b)) / 2 for a, b in zip(steps, steps[1:])]
    for step, left, right in zip(steps, [AREA["left"], *middles], [*middles, AREA["right"]]):
        here = [(curve, found[step]) for curve, found in zip(curves, values) if step in found]
        yield {
            "said": "\n".join(
                [
                    f"step {number(step)}",
                    *(
                        f"{curve.run}{curve.part and ', '}{curve.part}: {value:,.6g}"
                        for curve, value in here
                    ),
                ]
            ),
            "x": across.at(step),
            "left": left,
            "width": round(max(right - left, 0.1), 1),
            "dots": [(up.at(value), curve.number) for curve, value in here],
        }


def _lost(curves: Sequence[Curve]) -> Iterator[str]:
    """Yield a note for each run about steps without a finite value."""
    for curve in curves:
        if curve.gaps:
            steps = ", ".join(number(step) for step in curve.gaps[:5]) + (
                ", ..." if len(curve.gaps) > 5 else ""
            )
            yield f"{curve.run}: no finite value at step {steps}"
