"""The recipe's section `sweep`: a search over fields of the recipe, in which each trial is a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from ortlaunch.recipe.fields.best import DirectedMetric
from ortlaunch.recipe.fields.section import (
    MAX_COUNT,
    Positive,
    Section,
    convert_list_to_tuple,
    effect_rule,
)

_Range = Annotated[tuple[float, float], BeforeValidator(convert_list_to_tuple)]


class Parameter(Section):
    """Values of one field: exactly one of `choice`, `uniform`, `log_uniform` and `int`."""

    choice: (
        Annotated[tuple[object, ...], BeforeValidator(convert_list_to_tuple), Field(min_length=1)]
        | None
    ) = None
    """One of these values, as `[adamw, lamb]`; an item may be a list or a mapping."""
    uniform: _Range | None = None
    """A number between these two, as `[0.0, 0.1]`."""
    log_uniform: _Range | None = None
    """The same with equal weight for each order of magnitude, as `[1e-5, 1e-3]`."""
    # `int` would hide Python's in this class, so that no plain assignment can declare the field.
    __annotations__["int"] = Annotated[
        Annotated[tuple[int, int], BeforeValidator(convert_list_to_tuple)] | None,
        Field(default=None, description="A whole number between these two, both included."),
    ]
    when: dict[str, object] = {}
    """Search the field only in trials in which other fields of the space have these values, as
    `{optimizer.name: sgd}`; the others leave it as the recipe has it. Those fields come first."""

    @model_validator(mode="after")
    def _require_one_field_with_ordered_bounds(self) -> Parameter:
        set_fields = [name for name in VALUE_FIELDS if getattr(self, name) is not None]
        if len(set_fields) != 1:
            raise PydanticCustomError("space", f"give exactly one of {', '.join(VALUE_FIELDS)}")
        bounds = getattr(self, set_fields[0])
        if set_fields[0] != "choice" and not bounds[0] < bounds[1]:
            raise PydanticCustomError(
                "space", f"{set_fields[0]}: the first number must be the lower one"
            )
        if self.log_uniform and self.log_uniform[0] <= 0:
            raise PydanticCustomError("space", "log_uniform: both numbers must be > 0")
        return self

    @property
    def value_field(self) -> str:
        """The name of the field that is given."""
        return next(name for name in VALUE_FIELDS if getattr(self, name) is not None)

    @property
    def bounds_or_choices(self) -> tuple[object, ...]:
        """The given numbers, or the values of `choice`."""
        values: tuple[object, ...] = getattr(self, self.value_field)
        return values

    @property
    def finite_values(self) -> tuple[object, ...] | None:
        """All values; None if they are not a finite set."""
        int_bounds = getattr(self, "int", None)
        return tuple(range(int_bounds[0], int_bounds[1] + 1)) if int_bounds else self.choice

    def applies_to_trial(self, trial_values: Mapping[str, object]) -> bool:
        """Return whether a trial with these values of other fields searches this field."""
        return all(trial_values.get(name, self) == value for name, value in self.when.items())


VALUE_FIELDS = ("choice", "uniform", "log_uniform", "int")
"""The fields of Parameter that give its values."""


SWEEP_ALONE = effect_rule("only `ortlaunch sweep` reads it")


class Search(Section, resume_rule=SWEEP_ALONE):
    """A search over fields of this recipe, for `ortlaunch sweep`; each trial is a run (`ortlaunch docs sweep`)."""

    space: Annotated[dict[str, Parameter], Field(min_length=1)]
    """The fields and their values, by dotted path, as
    `{optimizer.learning_rate: {log_uniform: [1e-5, 1e-3]}}`. All other fields are the recipe's."""
    metrics: Annotated[
        tuple[DirectedMetric, ...], BeforeValidator(convert_list_to_tuple), Field(min_length=1)
    ] = (DirectedMetric(),)
    """The metrics to improve. With several, the result is every trial that no other one beats in all of
    them, and there is no pruner."""
    sampler: Literal["random", "grid", "tpe", "gp", "cmaes"] = "tpe"
    """Optuna's sampler of the next trial. `grid`: every combination once, in the order of the
    space."""
    pruner: Literal["none", "asha", "hyperband", "median"] = "none"
    """Optuna's rule that stops a trial after an evaluation that compares badly with other trials.
    The stopped run is saved, and `ortlaunch train` can continue it. `asha` (successive halving) and
    `hyperband` keep a third at each rung: after evaluation 1, 3, 9 and so on."""
    trials: Positive | None = None
    """Number of trials in all; null: no limit by it. The sweep ends at the first limit of `trials`,
    `steps` and `hours`, and `grid` at its last combination."""
    steps: Annotated[int, Field(ge=1, le=MAX_COUNT * 1000)] | None = None
    """No trial starts after all trials together have taken this many steps."""
    hours: Annotated[float, Field(gt=0)] | None = None
    """No trial starts this many hours after the command started."""
    parallel: Positive = 1
    """Number of trials at the same time; they share this machine's GPUs and cores evenly, or the hosts
    of --hostfile."""
    submit: bool = False
    """Queue each trial as a job of Slurm, with the section `submit`, `launch.nodes` and
    `launch.processes_per_node`; `parallel` is the number of jobs in the queue."""

    def grid_combinations(self) -> Iterator[dict[str, object]]:
        """Yield the fields of every combination of the space, whose sets are finite, in order."""
        return combinations_of_applicable_values(
            [*self.space.items()], lambda parameter: parameter.finite_values or (), {}
        )

    @property
    def max_trials(self) -> int | None:
        """The largest number of trials; None if only steps or hours limit it."""
        grid_size = sum(1 for _ in self.grid_combinations()) if self.sampler == "grid" else None
        return min((limit for limit in (self.trials, grid_size) if limit is not None), default=None)

    def sweep_summary_lines(self, trial_steps: int | None) -> list[str]:
        """Return the sweep as lines for a person.

        Args:
            trial_steps: steps of a trial; None: unknown.
        """
        limits = {"trials": self.max_trials, "steps": self.steps, "hours": self.hours}
        limits_text = ", ".join(f"{limit:g} {name}" for name, limit in limits.items() if limit)
        cost_text = (
            f"; at most {self.max_trials * trial_steps:,} steps"
            if self.max_trials and trial_steps and "train.max_steps" not in self.space
            else ""
        )
        metrics = ", ".join(parameter.metric for parameter in self.metrics)
        jobs = " as jobs of Slurm" if self.submit else ""
        return [
            f"sweep: {metrics} by {self.sampler}, pruner {self.pruner}, {self.parallel} at a "
            f"time{jobs}, "
            f"until {limits_text}{cost_text}; only `ortlaunch sweep` searches:",
            *(
                f"    {name}: {parameter.value_field} {json.dumps(parameter.bounds_or_choices)}"
                + (f" when {json.dumps(parameter.when)}" if parameter.when else "")
                for name, parameter in self.space.items()
            ),
        ]


def combinations_of_applicable_values(
    parameters: Sequence[tuple[str, Parameter]],
    values_of_parameter: Callable[[Parameter], Sequence[object]],
    chosen_values: Mapping[str, object],
) -> Iterator[dict[str, object]]:
    """Yield every combination of values of these fields, after values that are chosen already."""
    if not parameters:
        yield dict(chosen_values)
        return
    (name, parameter), *other_parameters = parameters
    if not parameter.applies_to_trial(chosen_values):
        yield from combinations_of_applicable_values(
            other_parameters, values_of_parameter, chosen_values
        )
        return
    for value in values_of_parameter(parameter):
        yield from combinations_of_applicable_values(
            other_parameters, values_of_parameter, {**chosen_values, name: value}
        )
