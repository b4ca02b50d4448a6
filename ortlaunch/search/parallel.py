"""Parallel coordinates of a sweep for its report: an axis for each field, a line for each trial."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ortlaunch.base.json_types import Json
from ortlaunch.recipe.fields.sweep import Parameter, Search
from ortlaunch.search.study import Trial, equal_result_sentence_or_empty, format_value


class Picture(NamedTuple):
    """The part of a sweep's report that is not about single runs."""

    figure: Json
    """The axes and lines, which report/charts.js draws."""
    best_lines: list[tuple[str, str]]
    """The text of each best trial, and which other trials have its result."""
    importances: list[tuple[str, float]]
    """The share of each field in the first metric's variance."""
    metric: str
    head: tuple[str, ...]
    rows: Sequence[tuple[object, ...]]
    """The table of all trials."""


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
    space = sweep_section.space
    metrics = [metric.metric for metric in sweep_section.metrics]
    ends_by_metric = {
        name: sorted(
            {function(trial.values[name] for trial in complete_trials) for function in (min, max)}
        )
        for name in metrics
        if complete_trials
    }
    axes = [
        {
            "name": name,
            "log": parameter.value_field == "log_uniform",
            "marks": [
                (_value_on_axis(parameter, value), format_value(value))
                for value in parameter.bounds_or_choices
            ],
        }
        for name, parameter in space.items()
    ] + [
        {"name": name, "log": False, "marks": [(end, f"{end:.4g}") for end in ends]}
        for name, ends in ends_by_metric.items()
    ]
    lines = [
        {
            "best": trial in best_trials,
            "text": f"trial {trial.number}: {trial.line()}",
            "values": {
                **{
                    name: _value_on_axis(space[name], value) for name, value in trial.fields.items()
                },
                **{name: trial.values[name] for name in metrics},
            },
        }
        # The best lines are drawn last, above the others.
        for trial in sorted(complete_trials, key=lambda trial: trial in best_trials)
    ]
    table_rows = [
        (
            # As the page names its run.
            f"{trial.number:04d}",
            trial.state,
            trial.steps,
            *map(trial.values.get, metrics),
            *(format_value(trial.fields[name]) if name in trial.fields else None for name in space),
        )
        for trial in trials
    ]
    return Picture(
        {
            "kind": "parallel",
            "title": "Parallel coordinates of the trials",
            "axes": axes,
            "lines": lines,
        },
        [
            (
                f"trial {trial.number}: {trial.line()}",
                equal_result_sentence_or_empty(trial, complete_trials),
            )
            for trial in best_trials
        ],
        [*importances.items()],
        metrics[0],
        ("trial", "state", "steps", *metrics, *space),
        table_rows,
    )


def _value_on_axis(parameter: Parameter, searched_value: object) -> float:
    """Return a field's value as a number; choices are numbered."""
    return (
        parameter.bounds_or_choices.index(searched_value)
        if parameter.value_field == "choice"
        else float(str(searched_value))
    )
