"""The recipe's section `schedule`, and its rules: (paths involved, message) for each one that is broken."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal, Optional

from pydantic import Field

from ortlaunch.recipe.place import Problem
from ortlaunch.recipe.section import Decay, Fraction, Section

if TYPE_CHECKING:
    from ortlaunch.recipe.models import Recipe

Length = Annotated[int, Field(ge=0)]
# What takes a field; the others would leave it without effect.
_TAKEN_BY = {
    "power": ("polynomial",),
    "minimum_ratio": ("linear", "cosine", "wsd"),
    "decay_ratio": ("wsd",),
    "decay_type": ("wsd",),
}


class Schedule(Section):
    """Learning rate over the steps, after a linear warm-up."""

    name: Literal["linear", "cosine", "polynomial", "constant", "wsd"] = "linear"
    """Decay after the warm-up: `linear`, `cosine` and `polynomial` to 0 at the last step (or to `minimum_ratio`), `wsd`
    (warm-up, stable, decay) at the end alone, `constant` not at all."""
    warmup_steps: Optional[Length] = None
    """Steps from 0 to the peak; or give `warmup_ratio`."""
    warmup_ratio: Optional[Fraction] = None
    """Warm-up as a share of all steps."""
    minimum_ratio: Decay = 0.0
    """Where `linear`, `cosine` and `wsd` end, as a share of `optimizer.learning_rate`: 0.1 in Llama 2."""
    power: Annotated[float, Field(gt=0)] = 1.0
    """Exponent of `polynomial`: 0.5 in BERT-large's phase 1 and 2."""
    decay_ratio: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1
    """The decay of `wsd` as a share of all steps."""
    decay_type: Literal["linear", "cosine", "1-sqrt"] = "linear"
    """Form of the decay of `wsd`."""


def schedule_rules(recipe: Recipe) -> Iterator[Problem]:
    """Every rule of the section that the recipe breaks."""
    schedule = recipe.schedule
    if schedule.warmup_steps is not None and schedule.warmup_ratio is not None:
        yield ("schedule.warmup_ratio", "schedule.warmup_steps"), "is given beside warmup_steps; keep one"
    steps = recipe.train.max_steps
    if schedule.warmup_steps is not None and steps is not None and schedule.warmup_steps > steps:
        yield (
            ("schedule.warmup_steps", "train.max_steps"),
            f"got {schedule.warmup_steps}, more than train.max_steps ({steps}): "
            "the learning rate would never reach its peak",
        )
    yield from _without_effect(schedule)
    yield from _overlap(schedule, steps)


def _without_effect(schedule: Schedule) -> Iterator[Problem]:
    """Fields of another schedule than the one that is named."""
    for field, names in _TAKEN_BY.items():
        if getattr(schedule, field) != Schedule.model_fields[field].default and schedule.name not in names:
            what = "polynomial's exponent" if field == "power" else f"for {', '.join(names)}"
            yield (f"schedule.{field}", "schedule.name"), f"does nothing with {schedule.name}: it is {what}"


def _overlap(schedule: Schedule, steps: Optional[int]) -> Iterator[Problem]:
    """A decay that would begin in the warm-up."""
    if schedule.name != "wsd":
        return
    field, warmup = "warmup_ratio", schedule.warmup_ratio or 0.0
    if schedule.warmup_steps is not None and steps is not None:
        field, warmup = "warmup_steps", schedule.warmup_steps / steps
    if warmup <= 1 < round(warmup + schedule.decay_ratio, 9):
        message = f"got {schedule.decay_ratio:g} of the steps beside a warm-up of {warmup:.3g} of them; they overlap"
        yield ("schedule.decay_ratio", f"schedule.{field}", "schedule.name"), message
