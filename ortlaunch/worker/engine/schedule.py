"""Learning rate as a pure function of the step, so that a resumed run needs no state for it."""

from __future__ import annotations

import math

from ortlaunch.recipe.fields.schedule import Schedule


def warmup_steps(schedule: Schedule, max_steps: int) -> int:
    """Steps of the warm-up."""
    if schedule.warmup_steps is not None:
        return schedule.warmup_steps
    return round((schedule.warmup_ratio or 0.0) * max_steps)


def decay_steps(schedule: Schedule, max_steps: int) -> int:
    """Steps of wsd's decay; at least one, and none of the warm-up's, which may be rounded up beside it."""
    return max(
        1,
        min(round(schedule.decay_ratio * max_steps), max_steps - warmup_steps(schedule, max_steps)),
    )


def factor(schedule: Schedule, step: int, max_steps: int) -> float:
    """Share of the peak learning rate at `step` (from 0).

    linear, cosine, constant and wsd are transformers' get_*_schedule_with_warmup and get_wsd_schedule, with
    `minimum_ratio` as its min_lr_rate after the warm-up; polynomial is BERT's own, (1 - step / max_steps) ** power
    after the warm-up. The warm-up is from 0 and one step ahead of transformers': its first step is 1 / warmup
    instead of 0. NVIDIA's PolyWarmUpScheduler has the same warm-up and is one step ahead of this decay: its last step
    is at 0. So no step is without effect.
    """
    warmup = warmup_steps(schedule, max_steps)
    if step < warmup:
        return (step + 1) / warmup
    if schedule.name == "constant":
        return 1.0
    if schedule.name == "polynomial":
        return float((1.0 - step / max_steps) ** schedule.power)
    whole = (schedule.name, max_steps - warmup)
    at_the_end = (schedule.decay_type, decay_steps(schedule, max_steps))
    form, steps = at_the_end if schedule.name == "wsd" else whole
    progress = max(0.0, (step - (max_steps - steps)) / max(1, steps))
    return schedule.minimum_ratio + (1.0 - schedule.minimum_ratio) * _decay(form, progress)


def _decay(form: str, progress: float) -> float:
    """From 1 to 0."""
    if form == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    return 1.0 - (math.sqrt(progress) if form == "1-sqrt" else progress)
