"""The learning rate as a pure function of the step: a resumed run needs no state for it.

Names and settings of the schedules are in recipe/fields/schedule.py, and the table of the fields
that each schedule uses is in recipe/rules/schedule_rules.py.
"""

from __future__ import annotations

import math

from ortlaunch.recipe.fields.schedule import Schedule


def warmup_step_count(schedule: Schedule, max_steps: int) -> int:
    """Return the number of warm-up steps."""
    if schedule.warmup_steps is not None:
        return schedule.warmup_steps
    return round((schedule.warmup_ratio or 0.0) * max_steps)


def wsd_decay_step_count(schedule: Schedule, max_steps: int) -> int:
    """Return the number of steps of wsd's decay: at least one, and none of the warm-up steps."""
    # Warm-up and decay may both be rounded up: their sum must not exceed max_steps.
    return max(
        1,
        min(
            round(schedule.decay_ratio * max_steps),
            max_steps - warmup_step_count(schedule, max_steps),
        ),
    )


def fraction_of_peak_learning_rate(schedule: Schedule, step_index: int, max_steps: int) -> float:
    """Return the share of the peak learning rate at `step_index` (from 0).

    linear, cosine, constant and wsd are get_*_schedule_with_warmup and get_wsd_schedule of
    transformers. `minimum_ratio` is their min_lr_rate after the warm-up. polynomial is BERT's
    schedule, (1 - step / max_steps) ** power after the warm-up.
    """
    # No step has a rate of 0, which would have no effect. The warm-up is one step ahead of
    # transformers': its first step is at 1 / warmup instead of 0. NVIDIA's PolyWarmUpScheduler has
    # the same warm-up, and its decay is one step ahead of this one: its last step is at 0.
    warmup = warmup_step_count(schedule, max_steps)
    if step_index < warmup:
        return float(((step_index + 1) / warmup) ** schedule.warmup_power)
    if schedule.name == "constant":
        return 1.0
    if schedule.name == "polynomial":
        return float((1.0 - step_index / max_steps) ** schedule.power)
    whole_decay = (schedule.name, max_steps - warmup)
    end_decay = (schedule.decay_type, wsd_decay_step_count(schedule, max_steps))
    decay_type, steps = end_decay if schedule.name == "wsd" else whole_decay
    progress = max(0.0, (step_index - (max_steps - steps)) / max(1, steps))
    return schedule.minimum_ratio + (1.0 - schedule.minimum_ratio) * _decay_factor(
        decay_type, progress
    )


def _decay_factor(decay_type: str, progress: float) -> float:
    """Return the factor of a decay, which falls from 1 to 0 while `progress` rises from 0 to 1."""
    if decay_type == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    return 1.0 - (math.sqrt(progress) if decay_type == "1-sqrt" else progress)
