"""Parallel coordinates of a sweep for its report: an axis for each field, a line for each trial."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ortlaunch.recipe.fields.sweep import Parameter, Search
from ortlaunch.search.study import Trial, shown, tie

# Pixels of the picture and of its axes; text is beside and below them.
_WIDTH = 900
_TOP = 26
_BOTTOM = 250
_LEFT = 100
_RIGHT = 790


class Axis(NamedTuple):
    """An axis and its labels."""

    x: float
    name: str
    labels: list[tuple[float, str]]
    """Position and text."""


class TrialLine(NamedTuple):
    """The line of one trial, over the axes of the fields that it has."""

    points: list[tuple[float, float]]
    is_best: bool
    text: str
    tie: str = ""
    """Which trials have the best one's result, too."""


class Picture(NamedTuple):
    """The axes and lines, and the share of each field in the first metric's variance."""

    axes: list[Axis]
    lines: list[TrialLine]
    importances: list[tuple[str, float]]
    metric: str
    head: tuple[str, ...]
    rows: Sequence[tuple[object, ...]]
    """The table of all trials."""
    width: int = _WIDTH
    top: int = _TOP
    bottom: int = _BOTTOM


def picture(
    search: Search, trials: Sequence[Trial], best: Sequence[Trial], importances: Mapping[str, float]
) -> Picture:
    """Return the picture of the complete trials.

    Args:
        search: the recipe's section, whose space has an axis for each field.
        trials: all trials.
        best: those to highlight.
        importances: the share of each field.
    """
    complete = [one for one in trials if one.state == "complete"]
    metrics = [metric.metric for metric in search.metrics]
    names = [*search.space, *metrics]
    xs = dict(zip(names, _spread(len(names), _LEFT, _RIGHT)))
    axes = [
        Axis(xs[name], name, [(_height(each, value), shown(value)) for value in each.ends])
        for name, each in search.space.items()
    ]
    heights: dict[str, dict[int, float]] = {}
    for name in metrics:
        values = [one.values[name] for one in complete]
        ends = (min(values, default=0.0), max(values, default=0.0))
        labels = dict(zip(ends, (_y(0), _y(1))))
        axes.append(Axis(xs[name], name, [(y, f"{value:.4g}") for value, y in labels.items()]))
        heights[name] = {one.number: _y(_share(one.values[name], *ends)) for one in complete}
    numbers = {one.number for one in best}
    lines = [
        TrialLine(
            [(xs[name], _height(search.space[name], value)) for name, value in one.fields.items()]
            + [(xs[name], heights[name][one.number]) for name in metrics],
            one.number in numbers,
            f"trial {one.number}: {one.line()}",
            tie(one, complete),
        )
        for one in complete
    ]
    # The best lines are drawn last, above the others.
    lines.sort(key=lambda line: line.is_best)
    rows = [
        (
            # As the page names its run.
            f"{one.number:04d}",
            one.state,
            one.steps,
            *map(one.values.get, metrics),
            *(shown(one.fields[name]) if name in one.fields else None for name in search.space),
        )
        for one in trials
    ]
    head = ("trial", "state", "steps", *metrics, *search.space)
    return Picture(axes, lines, [*importances.items()], metrics[0], head, rows)


def _height(parameter: Parameter, value: object) -> float:
    """Return the position of a field's value on its axis."""
    if parameter.kind == "choice":
        places = _spread(len(parameter.ends), 0.0, 1.0)
        return _y(places[parameter.ends.index(value)])
    low, high, here = (float(str(each)) for each in (*parameter.ends, value))
    if parameter.kind == "log_uniform":
        low, high, here = map(math.log, (low, high, here))
    return _y(_share(here, low, high))


def _share(value: float, low: float, high: float) -> float:
    return (value - low) / (high - low) if high > low else 0.5


def _y(share: float) -> float:
    return round(_BOTTOM - share * (_BOTTOM - _TOP), 1)


def _spread(number: int, first: float, last: float) -> list[float]:
    """Return evenly spread positions; a single one lies in the middle."""
    if number == 1:
        return [(first + last) / 2]
    return [round(first + (last - first) * at / (number - 1), 3) for at in range(number)]
