"""Learning rate as a pure function of the step, so that a resumed run needs no state for it."""

from __future__ import annotations

import math

from ortlaunch.recipe.models import Schedule


def warmup_steps(schedule: Schedule, max_steps: int) -> int:
    """Steps of the warm-up."""
    if schedule.warmup_steps is not None:
        return schedule.warmup_steps
    return round((schedule.warmup_ratio or 0.0) * max_steps)


def factor(schedule: Schedule, step: int, max_steps: int) -> float:
    """Share of the peak learning rate at `step` (from 0).

    linear, cosine and constant are transformers' get_*_schedule_with_warmup; polynomial is BERT's own,
    (1 - step / max_steps) ** power after the warm-up (NVIDIA's PolyWarmUpScheduler). The warm-up is one step ahead
    of theirs: its first step is 1 / warmup instead of 0, so that no step is without effect.
    """
    warmup = warmup_steps(schedule, max_steps)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, max_steps - warmup)
    if schedule.name == "constant":
        return 1.0
    if schedule.name == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    if schedule.name == "polynomial":
        return float((1.0 - step / max_steps) ** schedule.power)
    return 1.0 - progress
