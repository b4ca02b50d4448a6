"""A run that ended: the command that continues it, and whether any training is left to do."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ortlaunch.base.errors import DamagedFile
from ortlaunch.recipe import Recipe
from ortlaunch.run_folder.folder import RunDir, read_json_or_raise_damaged

# Options that `continue_command_if_train_was_typed` leaves out or sets itself.
_FOLDER_AND_RESUME_OPTIONS = ("--run-dir", "--resume")


def nothing_to_train_text_if_readable(recipe: Recipe, run: RunDir) -> str | None:
    """Return a line if all steps are complete and exported; None if not, or if that is unknown."""
    try:
        return _nothing_to_train_text_or_none(recipe, run)
    except (DamagedFile, KeyError, TypeError):
        return None


def _nothing_to_train_text_or_none(recipe: Recipe, run: RunDir) -> str | None:
    max_steps = recipe.train.max_steps
    if max_steps is None and run.steps.exists():
        recorded_steps = read_json_or_raise_damaged(run.steps)
        max_steps = (
            recorded_steps["max_steps"] if recorded_steps["epochs"] == recipe.train.epochs else None
        )
    # Not the summary's steps: a user who deletes the last checkpoint wants to continue from the
    # one before it.
    done_steps = run.newest_checkpoint_step_or_zero()
    if max_steps is None or not done_steps or not run.summary.exists() or not run.export.exists():
        return None
    # The summary is that of a shorter training: this one ended before its export.
    if read_json_or_raise_damaged(run.summary)["steps"] != done_steps:
        return None
    if done_steps >= max_steps:
        return f"nothing to train: {done_steps} of {max_steps} steps are done"
    early_stop = read_json_or_raise_damaged(run.summary).get("stopped_early")
    stop_condition = recipe.train.stop_after
    if early_stop is None or stop_condition is None:
        return None
    is_same_condition = (
        stop_condition.metric,
        stop_condition.direction,
        stop_condition.evaluations,
    ) == (
        early_stop["metric"],
        early_stop["mode"],
        early_stop["evaluations"],
    )
    return (
        f"nothing to train: stopped early after step {done_steps} of {max_steps} (train.stop_after)"
        if is_same_condition
        else None
    )


def continue_command_if_train_was_typed(
    typed_arguments: Sequence[str],
    recipe: Recipe,
    run: RunDir,
    was_stopped_before_last_step: bool = False,
) -> str | None:
    """Return the command that continues the run, if the user typed `train`.

    Args:
        typed_arguments: the arguments after `ortlaunch`.
        was_stopped_before_last_step: whether it stopped before its last step. The command then continues to the same
            length, else to twice the length.
    """
    if tuple(typed_arguments[:1]) != ("train",) or not (
        was_stopped_before_last_step or run.summary.exists()
    ):
        return None
    key, value = (
        ("", "")
        if was_stopped_before_last_step
        else _override_key_and_value_to_train_longer(
            recipe, read_json_or_raise_damaged(run.summary)
        )
    )
    change = [f"{key}={value}"] if key else []
    return shlex.join(
        [
            "ortlaunch",
            *_arguments_to_type_again(typed_arguments, key),
            f"--run-dir={run}",
            *change,
        ]
    )


def _override_key_and_value_to_train_longer(
    recipe: Recipe, run_summary: Mapping[str, Any]
) -> tuple[str, str]:
    # An early stop left steps to do, so that removing its condition is enough.
    if run_summary.get("stopped_early"):
        return "train.stop_after", "null"
    if recipe.train.epochs:
        return (
            "train.epochs",
            f"{2 * max(recipe.train.epochs, int(run_summary.get('epochs', 0))):g}",
        )
    return "train.max_steps", str(2 * run_summary["steps"])


def _arguments_to_type_again(typed_arguments: Sequence[str], omitted_key: str) -> Iterator[str]:
    """Yield the typed arguments without options of the run's folder, the key that changes and `--dry-run`.

    Also without `--resume`: `--resume never` would train from the beginning again.

    `train.epochs=null` stays beside `train.max_steps`: the recipe's file may have epochs.
    """
    omitted_prefixes = (
        "--dry-run",
        "--continue",
        *((f"{omitted_key}=", f"{omitted_key}.") if omitted_key else ()),
    )
    arguments = iter(typed_arguments)
    for argument in arguments:
        if argument in _FOLDER_AND_RESUME_OPTIONS:
            next(arguments, None)
        elif not argument.startswith(
            (*(f"{option}=" for option in _FOLDER_AND_RESUME_OPTIONS), *omitted_prefixes)
        ):
            yield argument
