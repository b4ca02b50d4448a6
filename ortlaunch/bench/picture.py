"""bench.png: a bar for each variant, as in bench.html. The only module that imports matplotlib."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from ortlaunch.base.errors import MissingDependency
from ortlaunch.base.json_types import Json


def require_matplotlib() -> None:
    """Check that matplotlib is installed, before anything is run.

    Raises:
        MissingDependency: it is absent.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependency(
            'bench.png needs matplotlib: pip install "ortlaunch[bench]", or leave --picture out'
        )


def write_bar_chart_as_png(chart: Json, picture_path: Path) -> None:
    """Draw the bar chart of a bench (report.charts.bar_chart)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = chart["rows"]
    # The height grows with the number of bars, in inches.
    figure = Figure(figsize=(9, 1.6 + 0.55 * len(rows)), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(
        [row["name"] for row in rows],
        [row["value"] for row in rows],
        color=[f"C{row['color']}" for row in rows],
        xerr=[
            [row["value"] - row["low"] for row in rows],
            [row["high"] - row["value"] for row in rows],
        ],
        capsize=3,
    )
    axes.bar_label(bars, [row["text"] for row in rows], padding=6)
    # The first variant is on top; a quarter more, as space for the labels.
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.set_title(chart["title"], loc="left", fontsize=9)
    FigureCanvasAgg(figure).print_png(str(picture_path))
