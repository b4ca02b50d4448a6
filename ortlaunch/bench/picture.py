"""bench.png: a bar for each variant. The only module that imports matplotlib."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from ortlaunch.base.errors import MissingDependency
from ortlaunch.base.json_types import Json

_COLORS = {"ort": "#2f6fb3", "inductor": "#d98c2b", "eager": "#8a8f98"}


def require_matplotlib() -> None:
    """Check that matplotlib is installed, before anything is run.

    Raises:
        MissingDependency: it is absent.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependency(
            'bench.png needs matplotlib: pip install "ortlaunch[bench]", or leave the picture '
            "out: --no-picture"
        )


def draw_and_write_bench_picture(
    variant_rows: Sequence[Json], title: str, picture_path: Path
) -> None:
    """Draw the median tokens (or samples) a second of each variant.

    A line on each bar shows the middle half of the steps.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rate_unit = "tokens" if all(row["tokens_per_second"] for row in variant_rows) else "samples"
    rates = [row[f"{rate_unit}_per_second"] for row in variant_rows]
    # The height grows with the number of bars, in inches.
    figure = Figure(figsize=(8, 1.6 + 0.55 * len(variant_rows)), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(
        range(len(variant_rows)),
        rates,
        color=[_COLORS[row["engine"]] for row in variant_rows],
        height=0.62,
        xerr=list(zip(*(_quartile_distances(row, rate) for row, rate in zip(variant_rows, rates)))),
        ecolor="#333333",
        capsize=3,
    )
    labels = [f"{rate:,.0f} ({row['ratio']:.2f} x)" for row, rate in zip(variant_rows, rates)]
    axes.bar_label(bars, labels, padding=6)
    axes.set_yticks(range(len(variant_rows)), [row["name"] for row in variant_rows])
    # The first variant is on top.
    axes.invert_yaxis()
    # A quarter more, as space for the labels.
    axes.set_xlim(
        0,
        max(rate + _quartile_distances(row, rate)[1] for row, rate in zip(variant_rows, rates))
        * 1.25,
    )
    axes.set_xlabel(
        f"{rate_unit} per second (median; the line is the interquartile range of the steps)"
    )
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    FigureCanvasAgg(figure).print_png(str(picture_path))


def _quartile_distances(variant_row: Json, median_rate: float) -> tuple[float, float]:
    """Return how far the quartiles are below and above the median rate; a slow step is a low rate."""
    seconds = variant_row["seconds"]
    scale = median_rate * seconds["median"]
    return median_rate - scale / seconds["quartile_3"], scale / seconds["quartile_1"] - median_rate
