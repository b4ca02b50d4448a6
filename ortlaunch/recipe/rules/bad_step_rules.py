"""Rules about responses to a bad step: (paths involved, message) for each broken rule. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from ortlaunch.recipe.fields.recipe import Recipe
from ortlaunch.recipe.fields.train import Train
from ortlaunch.recipe.text.place import Problem

# field -> the action whose repetitions it limits.
_LIMITS = {"max_skips": "skip", "max_rollbacks": "rollback"}


def actions(train: Train) -> set[str]:
    """Return the actions that may follow a bad step."""
    return {train.on_nonfinite, *([train.on_spike.action] if train.on_spike else [])}


def bad_step_rules(recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems of limits without effect, and of a disabled overflow check."""
    train = recipe.train
    for name, action in _LIMITS.items():
        limit = getattr(train, name)
        if limit != Train.model_fields[name].default and action not in actions(train):
            yield (
                (f"train.{name}", "train.on_nonfinite", "train.on_spike"),
                f"got {limit}, and no setting uses {action}; also set train.on_nonfinite: {action}",
            )
    spike = train.on_spike
    if spike and spike.limit is None and (spike.deviations is None or spike.patience > 1):
        paths = ("train.on_spike", "train.on_spike.deviations", "train.on_spike.patience")
        lacks = "patience" if spike.deviations else "deviations: null"
        yield paths, f"has {lacks} and no limit; also set train.on_spike.limit, a loss"
    # A raw setting may have any type: its values are checked elsewhere, not by pydantic.
    raw = recipe.zero.deepspeed.get("bf16") if recipe.zero else None
    if (
        isinstance(raw, dict)
        and raw.get("check_grad_overflow") is False
        and actions(train) != {"stop"}
    ):
        yield (
            ("zero.deepspeed", "train.on_nonfinite", "train.on_spike"),
            "has bf16.check_grad_overflow: false, with which DeepSpeed applies bad steps; "
            "leave it out",
        )
