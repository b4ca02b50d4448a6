"""Values of the figures that charts.js draws in a page. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from ortlaunch.run_folder.bench_row import VariantRow

# Pieces that a long line is divided into. The smallest and the largest value of each are drawn, so that
# no spike gets lost; 400 is close to the width in pixels.
_MAX_BUCKETS = 400

Point = tuple[float, float | None]


@dataclass(frozen=True)
class Curve:
    """The values of one run over its steps; None where one is infinite, undefined or missing."""

    run: str
    """The label of the run."""
    index: int
    """The position of the run in the page, which determines its colour."""
    points: Sequence[Point]
    starts: Sequence[int] = ()
    """Steps after which a later start of the run went on."""
    part: str = ""
    """Which of several values of the run it shows, such as `evaluation`, whose line is dotted."""


def line_chart_or_none(
    title: str,
    curves: Sequence[Curve],
    begins_at_zero: bool = False,
    is_between_0_and_1: bool = False,
) -> dict[str, object] | None:
    """Return everything that charts.js draws of one chart; None where no run has a value.

    Args:
        title: the chart's heading.
        curves: one or two for each run.
        begins_at_zero: whether the axis of values begins at 0.
        is_between_0_and_1: whether no value lies below 0 or above 1.
    """
    drawn_curves = [curve for curve in curves if any(y is not None for _, y in curve.points)]
    if not drawn_curves:
        return None
    return {
        "kind": "lines",
        "title": title,
        "from_zero": begins_at_zero,
        "share": is_between_0_and_1,
        "parts": [part for part in dict.fromkeys(curve.part for curve in drawn_curves) if part],
        "lost": list(_missing_value_notes(curves)),
        "curves": [
            {**asdict(curve), "points": thinned_points(curve.points)} for curve in drawn_curves
        ],
    }


def thinned_points(points: Sequence[Point]) -> list[Point]:
    """Return the smallest and the largest point of each of `_MAX_BUCKETS` pieces, ordered by step.

    A short list of points is returned unchanged. Of adjacent points without a value one stays.
    """
    if len(points) <= 2 * _MAX_BUCKETS:
        return list(points)
    bucket_size = math.ceil(len(points) / _MAX_BUCKETS)
    kept_points: list[Point] = []
    # A point without a value ends a bucket, because it interrupts the line.
    for (_, is_missing), group in groupby(
        enumerate(points), key=lambda item: (item[0] // bucket_size, item[1][1] is None)
    ):
        bucket = [point for _, point in group]
        extremes = (
            {bucket[0]}
            if is_missing
            else {min(bucket, key=lambda p: p[1] or 0.0), max(bucket, key=lambda p: p[1] or 0.0)}
        )
        kept_points += sorted(extremes, key=lambda point: point[0])
    return kept_points


def bar_chart(variant_rows: Sequence[VariantRow], title: str) -> dict[str, Any]:
    """Return a bar for the median tokens (or samples) a second of each measured variant of a bench.

    The thin line of a bar shows the middle half of the steps.
    """
    token_rates = [row["tokens_per_second"] for row in variant_rows if row["tokens_per_second"]]
    has_tokens = len(token_rates) == len(variant_rows)
    rate_unit = "tokens" if has_tokens else "samples"
    rates = token_rates if has_tokens else [row["samples_per_second"] for row in variant_rows]
    engines = list(dict.fromkeys(row["engine"] for row in variant_rows))
    return {
        "kind": "bars",
        "title": f"{title}: {rate_unit} per second (median; the line is the middle half of the steps)",
        "rows": [
            {
                "name": row["name"],
                "color": engines.index(row["engine"]),
                "value": rate,
                # A slow step is a low rate.
                "low": rate * row["seconds"]["median"] / row["seconds"]["quartile_3"],
                "high": rate * row["seconds"]["median"] / row["seconds"]["quartile_1"],
                "text": f"{rate:,.0f} ({row['ratio']:.2f} x)",
            }
            for row, rate in zip(variant_rows, rates)
        ],
    }


def _missing_value_notes(curves: Sequence[Curve]) -> Iterator[str]:
    """Yield a note for each run about steps without a finite value."""
    for curve in curves:
        missing_steps = [f"{step:,}" for step, value in curve.points if value is None]
        if missing_steps:
            steps_text = ", ".join(missing_steps[:5]) + (", ..." if len(missing_steps) > 5 else "")
            yield f"{curve.run}: no finite value at step {steps_text}"
