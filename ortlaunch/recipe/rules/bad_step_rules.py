"""Rules about responses to a bad step: (paths involved, message) for each broken rule. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from ortlaunch.recipe.fields.recipe import Recipe
from ortlaunch.recipe.fields.train import Train
from ortlaunch.recipe.text.source_location import Problem

# field -> the action whose repetitions it limits.
_ACTION_BY_LIMIT = {"max_skips": "skip", "max_rollbacks": "rollback"}


def bad_step_actions(train: Train) -> set[str]:
    """Return the actions that may follow a bad step."""
    return {train.on_nonfinite, *([train.on_spike.action] if train.on_spike else [])}


def bad_step_limit_rules(recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems of limits without effect, and of a disabled overflow check."""
    train = recipe.train
    for limit_field, action in _ACTION_BY_LIMIT.items():
        limit = getattr(train, limit_field)
        if limit != Train.model_fields[limit_field].default and action not in bad_step_actions(
            train
        ):
            yield (
                (f"train.{limit_field}", "train.on_nonfinite", "train.on_spike"),
                f"got {limit}, and no setting uses {action}; also set train.on_nonfinite: {action}",
            )
    spike = train.on_spike
    if spike and spike.limit is None and (spike.deviations is None or spike.patience > 1):
        key_names = ("train.on_spike", "train.on_spike.deviations", "train.on_spike.patience")
        mistake_text = "patience" if spike.deviations else "deviations: null"
        yield key_names, f"has {mistake_text} and no limit; also set train.on_spike.limit, a loss"
    # A raw setting may have any type: its values are checked elsewhere, not by pydantic.
    raw_bf16 = recipe.zero.deepspeed.get("bf16") if recipe.zero else None
    if (
        isinstance(raw_bf16, dict)
        and raw_bf16.get("check_grad_overflow") is False
        and bad_step_actions(train) != {"stop"}
    ):
        yield (
            ("zero.deepspeed", "train.on_nonfinite", "train.on_spike"),
            "has bf16.check_grad_overflow: false, with which DeepSpeed applies bad steps; "
            "leave it out",
        )
