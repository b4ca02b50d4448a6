"""What a chart draws: a line for each run over the steps, with the values under the pointer.
Pure."""

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
        low, high, value = (
            _log(v) if self.logarithmic else v for v in (self.low, self.high, value)
        )
        return round(self.first + (value - low) / (high - low or 1.0) * (self.last - self.first), 1)


def chart(title: str, curves: Sequence[Curve], from_zero: bool = False) -> dict[str, object] | None:
    """Everything that one chart draws; None where no run has a value.

    Args:
        from_zero: whether the axis of values begins at 0.
    """
    drawn = [curve for curve in curves if curve.finite]
    if not drawn:
        return None
    across, up = _scales(drawn, from_zero)
    values = _decades(up) if up.logarithmic else ticks(up.low, up.high)
    steps = ticks(across.low, across.high, 4)
    return {
        "title": f"{title} (logarithmic)" if up.logarithmic else title,
        "rows": [(up.at(value), number(value)) for value in values],
        "columns": [(across.at(step), number(step)) for step in steps if step == int(step)],
        "curves": [_drawn(curve, across, up) for curve in drawn],
        "strips": list(_strips(drawn, across, up)),
        "lost": list(_lost(curves)),
    }


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
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(each * step, 12) for each in range(first, last + 1)]


def _log(value: float) -> float:
    return math.log10(max(value, 1e-300))


def _scales(curves: Sequence[Curve], from_zero: bool) -> tuple[Scale, Scale]:
    xs = [x for curve in curves for x, _ in curve.points]
    ys = [y for curve in curves for _, y in curve.finite]
    low = min(0.0, *ys) if from_zero else min(ys)
    high = max(ys)
    wide = not from_zero and low > 0 and high > _SPREAD * statistics.median(ys)
    if low == high:
        low = low - abs(low) * 0.1 - (low == 0)
        high = high + abs(high) * 0.1 + (high == 0)
    elif not wide:
        room = (high - low) * 0.05
        low = low if low == 0 and from_zero else low - room
        high = high + room
    across = Scale(min(0, *xs), max(xs), AREA["left"], AREA["right"])
    return across, Scale(low, high, AREA["bottom"], AREA["top"], wide)


def _decades(up: Scale) -> list[float]:
    inside = [
        10.0**power for power in range(math.ceil(_log(up.low)), math.floor(_log(up.high)) + 1)
    ]
    return inside if len(inside) >= 2 else [up.low, up.high]


def _drawn(curve: Curve, across: Scale, up: Scale) -> Json:
    """The lines of a run; few points are drawn as dots, too, and where a later start took the run
    up again."""
    groups = groupby(curve.points, key=lambda point: point[1] is not None)
    lines = [[(x, y) for x, y in group if y is not None] for is_whole, group in groups if is_whole]
    return {
        "run": curve.run,
        "number": curve.number,
        "starts": [(step, across.at(step)) for step in curve.starts],
        "lines": [[(across.at(x), up.at(y)) for x, y in thinned(points)] for points in lines],
        "dots": [(across.at(x), up.at(y)) for x, y in curve.finite]
        if len(curve.finite) <= _DOTS
        else [],
    }


def thinned(points: Sequence[Point]) -> list[Point]:
    """The least and the greatest value of each of so many pieces, in their order; few points as
    they are."""
    if len(points) <= 2 * _BUCKETS:
        return list(points)
    size = math.ceil(len(points) / _BUCKETS)
    pieces = [points[at : at + size] for at in range(0, len(points), size)]
    ends = [{min(piece, key=lambda p: p[1]), max(piece, key=lambda p: p[1])} for piece in pieces]
    return sorted({points[0], points[-1], *(point for pair in ends for point in pair)})


def _strips(curves: Sequence[Curve], across: Scale, up: Scale) -> Iterator[dict[str, object]]:
    """Transparent strips whose title, shown under the pointer, is each run's value there."""
    steps = sorted({x for curve in curves for x, _ in curve.finite})
    steps = steps[:: math.ceil(len(steps) / _STRIPS)]
    values = [dict(curve.finite) for curve in curves]
    middles = [(across.at(a) + across.at(b)) / 2 for a, b in zip(steps, steps[1:])]
    for step, left, right in zip(steps, [AREA["left"], *middles], [*middles, AREA["right"]]):
        here = [(curve, found[step]) for curve, found in zip(curves, values) if step in found]
        yield {
            "said": "\n".join(
                [f"step {number(step)}", *(f"{curve.run}: {value:,.6g}" for curve, value in here)]
            ),
            "x": across.at(step),
            "left": left,
            "width": round(max(right - left, 0.1), 1),
            "dots": [(up.at(value), curve.number) for curve, value in here],
        }


def _lost(curves: Sequence[Curve]) -> Iterator[str]:
    """What the lines do not show, in words."""
    for curve in curves:
        if curve.gaps:
            steps = ", ".join(number(step) for step in curve.gaps[:5]) + (
                ", ..." if len(curve.gaps) > 5 else ""
            )
            yield f"{curve.run}: no finite value at step {steps}"
