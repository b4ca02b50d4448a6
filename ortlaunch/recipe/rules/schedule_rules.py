"""Rules for the section `schedule`."""

from __future__ import annotations

from collections.abc import Iterator

from ortlaunch.recipe.fields.recipe import Recipe
from ortlaunch.recipe.fields.schedule import Schedule
from ortlaunch.recipe.text.source_location import Problem

# field -> the schedules that use it; on all others it has no effect.
_SCHEDULES_BY_FIELD = {
    "power": ("polynomial",),
    "minimum_ratio": ("linear", "cosine", "wsd"),
    "decay_ratio": ("wsd",),
    "decay_type": ("wsd",),
}


def warmup_and_decay_rules(recipe: Recipe) -> Iterator[Problem]:
    """Yield every broken rule of the section."""
    schedule = recipe.schedule
    if schedule.warmup_steps is not None and schedule.warmup_ratio is not None:
        yield (
            ("schedule.warmup_ratio", "schedule.warmup_steps"),
            "is given beside warmup_steps; keep one",
        )
    if schedule.warmup_power != 1 and not (schedule.warmup_steps or schedule.warmup_ratio):
        yield (
            ("schedule.warmup_power", "schedule.warmup_steps"),
            "has no effect without a warm-up; also set warmup_steps or warmup_ratio",
        )
    max_steps = recipe.train.max_steps
    if (
        schedule.warmup_steps is not None
        and max_steps is not None
        and schedule.warmup_steps > max_steps
    ):
        yield (
            ("schedule.warmup_steps", "train.max_steps"),
            f"got {schedule.warmup_steps}, more than train.max_steps ({max_steps}): "
            "the learning rate would never reach its peak",
        )
    yield from _field_of_other_schedule_rules(schedule)
    yield from _decay_during_warmup_rules(schedule, max_steps)


def _field_of_other_schedule_rules(schedule: Schedule) -> Iterator[Problem]:
    """Yield the problems of fields that belong to another schedule."""
    for field, schedule_names in _SCHEDULES_BY_FIELD.items():
        if (
            getattr(schedule, field) != Schedule.model_fields[field].default
            and schedule.name not in schedule_names
        ):
            field_text = (
                "polynomial's exponent" if field == "power" else f"for {', '.join(schedule_names)}"
            )
            yield (
                (f"schedule.{field}", "schedule.name"),
                f"has no effect with {schedule.name}: it is {field_text}",
            )


def _decay_during_warmup_rules(schedule: Schedule, max_steps: int | None) -> Iterator[Problem]:
    """Yield a problem where the decay of `wsd` would begin during the warm-up."""
    if schedule.name != "wsd":
        return
    warmup_field = "warmup_ratio"
    warmup_share = schedule.warmup_ratio or 0.0
    if schedule.warmup_steps is not None and max_steps is not None:
        warmup_field = "warmup_steps"
        warmup_share = schedule.warmup_steps / max_steps
    # Rounding: 0.9 + 0.1 must not exceed 1. A warm-up above 1 has an error of its own.
    if warmup_share <= 1 < round(warmup_share + schedule.decay_ratio, 9):
        yield (
            ("schedule.decay_ratio", f"schedule.{warmup_field}", "schedule.name"),
            (
                f"got {schedule.decay_ratio:g} of the steps beside a warm-up of {warmup_share:.3g} of them; "
                "they overlap"
            ),
        )
