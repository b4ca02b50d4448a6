"""Parallel coordinates of a sweep for its report: an axis for each field, a line for each trial."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ortlaunch.recipe.fields.sweep import Parameter, Search
from ortlaunch.search.study import Trial, equal_result_sentence_or_empty, format_value

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


def parallel_coordinates_picture_of_trials(
    sweep_section: Search,
    trials: Sequence[Trial],
    best_trials: Sequence[Trial],
    importances: Mapping[str, float],
) -> Picture:
    """Return the picture of the complete trials.

    Args:
        sweep_section: the recipe's section, whose space has an axis for each field.
        trials: all trials.
        best_trials: those to highlight.
        importances: the share of each field.
    """
    complete_trials = [trial for trial in trials if trial.state == "complete"]
    metrics = [metric.metric for metric in sweep_section.metrics]
    names = [*sweep_section.space, *metrics]
    position_by_name = dict(zip(names, _even_positions(len(names), _LEFT, _RIGHT)))
    axes = [
        Axis(
            position_by_name[name],
            name,
            [
                (_pixel_of_value_on_axis(parameter, value), format_value(value))
                for value in parameter.bounds_or_choices
            ],
        )
        for name, parameter in sweep_section.space.items()
    ]
    height_by_metric_and_trial: dict[str, dict[int, float]] = {}
    for name in metrics:
        values = [trial.values[name] for trial in complete_trials]
        value_range = (min(values, default=0.0), max(values, default=0.0))
        labels = dict(zip(value_range, (_pixel_of_share(0), _pixel_of_share(1))))
        axes.append(
            Axis(position_by_name[name], name, [(y, f"{value:.4g}") for value, y in labels.items()])
        )
        height_by_metric_and_trial[name] = {
            trial.number: _pixel_of_share(_share_of_range(trial.values[name], *value_range))
            for trial in complete_trials
        }
    best_numbers = {trial.number for trial in best_trials}
    lines = [
        TrialLine(
            [
                (position_by_name[name], _pixel_of_value_on_axis(sweep_section.space[name], value))
                for name, value in trial.fields.items()
            ]
            + [
                (position_by_name[name], height_by_metric_and_trial[name][trial.number])
                for name in metrics
            ],
            trial.number in best_numbers,
            f"trial {trial.number}: {trial.line()}",
            equal_result_sentence_or_empty(trial, complete_trials),
        )
        for trial in complete_trials
    ]
    # The best lines are drawn last, above the others.
    lines.sort(key=lambda line: line.is_best)
    table_rows = [
        (
            # As the page names its run.
            f"{trial.number:04d}",
            trial.state,
            trial.steps,
            *map(trial.values.get, metrics),
            *(
                format_value(trial.fields[name]) if name in trial.fields else None
                for name in sweep_section.space
            ),
        )
        for trial in trials
    ]
    table_head = ("trial", "state", "steps", *metrics, *sweep_section.space)
    return Picture(axes, lines, [*importances.items()], metrics[0], table_head, table_rows)


def _pixel_of_value_on_axis(parameter: Parameter, searched_value: object) -> float:
    """Return the position of a field's value on its axis."""
    if parameter.value_field == "choice":
        positions = _even_positions(len(parameter.bounds_or_choices), 0.0, 1.0)
        return _pixel_of_share(positions[parameter.bounds_or_choices.index(searched_value)])
    lower_end, upper_end, field_value = (
        float(str(number_text)) for number_text in (*parameter.bounds_or_choices, searched_value)
    )
    if parameter.value_field == "log_uniform":
        lower_end, upper_end, field_value = map(math.log, (lower_end, upper_end, field_value))
    return _pixel_of_share(_share_of_range(field_value, lower_end, upper_end))


def _share_of_range(range_value: float, range_start: float, range_end: float) -> float:
    return (
        (range_value - range_start) / (range_end - range_start) if range_end > range_start else 0.5
    )


def _pixel_of_share(share_of_height: float) -> float:
    return round(_BOTTOM - share_of_height * (_BOTTOM - _TOP), 1)


def _even_positions(
    position_count: int, first_position: float, last_position: float
) -> list[float]:
    """Return evenly spread positions; a single one lies in the middle."""
    if position_count == 1:
        return [(first_position + last_position) / 2]
    return [
        round(
            first_position
            + (last_position - first_position) * position_index / (position_count - 1),
            3,
        )
        for position_index in range(position_count)
    ]
