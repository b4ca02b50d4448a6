"""bench.png: a bar for each variant. The only module that imports matplotlib."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from ortlaunch.errors import MissingDependency
from ortlaunch.json_types import Json

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


def draw(rows: Sequence[Json], title: str, path: Path) -> None:
    """Draw the median tokens (or samples) a second of each variant.

    A line on each bar shows the middle half of the steps.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    unit = "tokens" if all(row["tokens_per_second"] for row in rows) else "samples"
    rates = [row[f"{unit}_per_second"] for row in rows]
    # The height grows with the number of bars, in inches.
    figure = Figure(figsize=(8, 1.6 + 0.55 * len(rows)), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(
        range(len(rows)), rates, color=[_COLORS[row["engine"]] for row in rows], height=0.62,
        xerr=list(zip(*(_errors(row, rate) for row, rate in zip(rows, rates)))), ecolor="#333333", capsize=3,
    )  # fmt: skip
    labels = [f"{rate:,.0f} ({row['ratio']:.2f} x)" for row, rate in zip(rows, rates)]
    axes.bar_label(bars, labels, padding=6)
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
    # The first variant is on top.
    axes.invert_yaxis()
    # A quarter more, as space for the labels.
    axes.set_xlim(0, max(rate + _errors(row, rate)[1] for row, rate in zip(rows, rates)) * 1.25)
    axes.set_xlabel(f"{unit} per second (median; the line is the interquartile range of the steps)")
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    FigureCanvasAgg(figure).print_png(str(path))


def _errors(row: Json, rate: float) -> tuple[float, float]:
    """Return how far the quartiles are below and above the median rate; a slow step is a low rate."""
    seconds = row["seconds"]
    scale = rate * seconds["median"]
    return rate - scale / seconds["quartile_3"], scale / seconds["quartile_1"] - rate
