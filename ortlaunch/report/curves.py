"""Values of a chart: a line for each run over its steps, and its tooltips. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from ortlaunch.base.json_types import Json

# Pixels of a chart and of the part with the lines, and the colours of style.css.
CHART_AREA = {
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
_MAX_BUCKETS = 400
# Maximum number of positions that show their values under the pointer.
_MAX_STRIPS = 100
# Up to this many points are also drawn as dots: a line alone would hide that they are few.
_MAX_DOTS = 40
# The scale is logarithmic where the largest value exceeds this many medians.
_LOGARITHMIC_SPREAD = 50

Point = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """The values of one run; None where one is infinite, undefined or missing."""

    run_label: str
    run_index: int
    values_by_step: Sequence[tuple[float, float | None]]
    start_steps: Sequence[int] = ()
    part_name: str = ""
    """Which of several values of the run it shows, such as `evaluation`, whose line is dotted."""

    @property
    def finite_points(self) -> list[Point]:
        """Points with a value."""
        return [(x, y) for x, y in self.values_by_step if y is not None]

    @property
    def missing_steps(self) -> list[float]:
        """Steps whose value is missing or not finite."""
        return [x for x, y in self.values_by_step if y is None]


@dataclass(frozen=True)
class Scale:
    """A linear or logarithmic map from a range of values to a range of pixels."""

    lowest: float
    highest: float
    first_pixel: float
    last_pixel: float
    is_logarithmic: bool = False

    def pixel_of(self, value: float) -> float:
        """Return the pixel of a value."""
        low, high, value = (
            _finite_log10(number) if self.is_logarithmic else number
            for number in (self.lowest, self.highest, value)
        )
        # A range of one value would divide by 0. Tenths of a pixel keep the page small.
        return round(
            self.first_pixel
            + (value - low) / (high - low or 1.0) * (self.last_pixel - self.first_pixel),
            1,
        )


def chart_values_or_none(
    title: str,
    curves: Sequence[Curve],
    begins_at_zero: bool = False,
    is_between_0_and_1: bool = False,
) -> dict[str, object] | None:
    """Return everything that page.html draws of one chart; None where no run has a value.

    Args:
        title: the chart's heading.
        curves: one or two for each run.
        begins_at_zero: whether the axis of values begins at 0.
        is_between_0_and_1: whether no value lies below 0 or above 1.
    """
    drawn_curves = [curve for curve in curves if curve.finite_points]
    if not drawn_curves:
        return None
    step_scale, value_scale = _step_and_value_scales(
        drawn_curves, begins_at_zero, is_between_0_and_1
    )
    value_ticks = (
        _decade_tick_values(value_scale)
        if value_scale.is_logarithmic
        else round_axis_tick_values(value_scale.lowest, value_scale.highest)
    )
    step_ticks = round_axis_tick_values(step_scale.lowest, step_scale.highest, 4)
    return {
        "title": f"{title} (logarithmic)" if value_scale.is_logarithmic else title,
        # Marks on the value axis, then on the axis of steps: (pixel, label).
        "rows": [(value_scale.pixel_of(value), axis_label(value)) for value in value_ticks],
        "columns": [
            (step_scale.pixel_of(step), axis_label(step))
            for step in step_ticks
            if step == int(step)
        ],
        "curves": [
            _curve_lines_dots_and_starts(curve, step_scale, value_scale) for curve in drawn_curves
        ],
        "strips": list(_tooltip_strips(drawn_curves, step_scale, value_scale)),
        "parts": [
            part for part in dict.fromkeys(curve.part_name for curve in drawn_curves) if part
        ],
        "lost": list(_missing_value_notes(curves)),
    }


def axis_label(value: float) -> str:
    """Return a value in a short form for an axis: 1.5e-4 instead of 0.00015."""
    if 0 < abs(value) < 1e-3:
        mantissa, exponent = f"{value:.3e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def round_axis_tick_values(lowest: float, highest: float, tick_count: int = 5) -> list[float]:
    """Return round numbers from low to high, about as many as `tick_count`, for the marks of an axis."""
    raw_step = (highest - lowest) / tick_count or abs(highest) or 1.0
    power_of_ten = 10.0 ** math.floor(math.log10(raw_step))
    # 0.999: rounding must not skip a factor that fits exactly.
    tick_step = next(
        power_of_ten * factor
        for factor in (1, 2, 5, 10)
        if power_of_ten * factor >= raw_step * 0.999
    )
    # 1e-9: a bound that is a multiple of the step but for rounding keeps its mark.
    first_multiple = math.ceil(lowest / tick_step - 1e-9)
    last_multiple = math.floor(highest / tick_step + 1e-9)
    return [
        round(multiple * tick_step, 12) for multiple in range(first_multiple, last_multiple + 1)
    ]


def _finite_log10(value: float) -> float:
    # The smallest positive double is about 1e-308: 0 and negative values get a finite logarithm.
    return math.log10(max(value, 1e-300))


def _step_and_value_scales(
    curves: Sequence[Curve], begins_at_zero: bool, is_between_0_and_1: bool
) -> tuple[Scale, Scale]:
    xs = [x for curve in curves for x, _ in curve.values_by_step]
    ys = [y for curve in curves for _, y in curve.finite_points]
    lowest = min(0.0, *ys) if begins_at_zero else min(ys)
    highest = max(ys)
    # Only positive values have a logarithm.
    is_logarithmic = (
        not begins_at_zero and lowest > 0 and highest > _LOGARITHMIC_SPREAD * statistics.median(ys)
    )
    # A constant line is drawn in the middle: 10 % around its value, or from -1 to 1 for 0.
    if lowest == highest:
        lowest = lowest - abs(lowest) * 0.1 - (lowest == 0)
        highest = highest + abs(highest) * 0.1 + (highest == 0)
    elif not is_logarithmic:
        margin = (highest - lowest) * 0.05
        lowest = lowest if lowest == 0 and begins_at_zero else lowest - margin
        highest = highest + margin
    if is_between_0_and_1:
        lowest, highest = max(lowest, 0.0), min(highest, 1.0)
    # SVG's y axis points down: the lowest value is at the bottom pixel, the larger number.
    step_scale = Scale(min(0, *xs), max(xs), CHART_AREA["left"], CHART_AREA["right"])
    return step_scale, Scale(
        lowest, highest, CHART_AREA["bottom"], CHART_AREA["top"], is_logarithmic
    )


def _decade_tick_values(value_scale: Scale) -> list[float]:
    inner_decades = [
        10.0**power
        for power in range(
            math.ceil(_finite_log10(value_scale.lowest)),
            math.floor(_finite_log10(value_scale.highest)) + 1,
        )
    ]
    # Fewer than two powers of ten would make an axis without a scale: mark the ends instead.
    return inner_decades if len(inner_decades) >= 2 else [value_scale.lowest, value_scale.highest]


def _curve_lines_dots_and_starts(curve: Curve, step_scale: Scale, value_scale: Scale) -> Json:
    """Return a run's lines, its dots if it has few points, and the steps of resumed starts."""
    # A step without a value interrupts the line.
    groups = groupby(curve.values_by_step, key=lambda point: point[1] is not None)
    line_points = [
        [(x, y) for x, y in point_group if y is not None]
        for is_whole, point_group in groups
        if is_whole
    ]
    return {
        "run": curve.run_label,
        "number": curve.run_index,
        "part": curve.part_name,
        "starts": [(step, step_scale.pixel_of(step)) for step in curve.start_steps],
        "lines": [
            [
                (step_scale.pixel_of(x), value_scale.pixel_of(y))
                for x, y in extremes_of_point_buckets(points)
            ]
            for points in line_points
        ],
        "dots": [(step_scale.pixel_of(x), value_scale.pixel_of(y)) for x, y in curve.finite_points]
        if len(curve.finite_points) <= _MAX_DOTS
        else [],
    }


def extremes_of_point_buckets(points: Sequence[Point]) -> list[Point]:
    """Return the smallest and the largest point of each of `_BUCKETS` pieces, ordered by step.

    A short list of points is returned unchanged.
    """
    if len(points) <= 2 * _MAX_BUCKETS:
        return list(points)
    bucket_size = math.ceil(len(points) / _MAX_BUCKETS)
    buckets = [
        points[bucket_start : bucket_start + bucket_size]
        for bucket_start in range(0, len(points), bucket_size)
    ]
    extremes = [
        {
            min(bucket, key=lambda candidate: candidate[1]),
            max(bucket, key=lambda candidate: candidate[1]),
        }
        for bucket in buckets
    ]
    # The set removes a point that is both, as in a constant piece.
    return sorted(
        {
            points[0],
            points[-1],
            *(point for bucket_extremes in extremes for point in bucket_extremes),
        }
    )


def _tooltip_strips(
    curves: Sequence[Curve], step_scale: Scale, value_scale: Scale
) -> Iterator[dict[str, object]]:
    """Yield transparent strips whose titles, each run's value there, the browser shows as
    tooltips."""
    strip_steps = sorted({x for curve in curves for x, _ in curve.finite_points})
    # Every n-th step, so that the page stays small.
    strip_steps = strip_steps[:: math.ceil(len(strip_steps) / _MAX_STRIPS)]
    value_by_step = [dict(curve.finite_points) for curve in curves]
    # Adjacent strips meet halfway between their steps.
    strip_borders = [
        (step_scale.pixel_of(a) + step_scale.pixel_of(b)) / 2
        for a, b in zip(strip_steps, strip_steps[1:])
    ]
    for step, left_pixel, right_pixel in zip(
        strip_steps, [CHART_AREA["left"], *strip_borders], [*strip_borders, CHART_AREA["right"]]
    ):
        curves_with_value = [
            (curve, values_of_curve[step])
            for curve, values_of_curve in zip(curves, value_by_step)
            if step in values_of_curve
        ]
        yield {
            "said": "\n".join(
                [
                    f"step {axis_label(step)}",
                    *(
                        f"{curve.run_label}{curve.part_name and ', '}{curve.part_name}: {value:,.6g}"
                        for curve, value in curves_with_value
                    ),
                ]
            ),
            "x": step_scale.pixel_of(step),
            "left": left_pixel,
            "width": round(max(right_pixel - left_pixel, 0.1), 1),
            "dots": [
                (value_scale.pixel_of(value), curve.run_index) for curve, value in curves_with_value
            ],
        }


def _missing_value_notes(curves: Sequence[Curve]) -> Iterator[str]:
    """Yield a note for each run about steps without a finite value."""
    for curve in curves:
        if curve.missing_steps:
            steps_text = ", ".join(axis_label(step) for step in curve.missing_steps[:5]) + (
                ", ..." if len(curve.missing_steps) > 5 else ""
            )
            yield f"{curve.run_label}: no finite value at step {steps_text}"
