"""A run that ended: the command that continues it, and whether another start has anything left to train."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ortlaunch.errors import DamagedFile
from ortlaunch.recipe import Recipe
from ortlaunch.recipe.fields.best import direction
from ortlaunch.run_folder.folder import RunDir, read_json

CONTINUE = "to continue: "
_PLACES = ("--run-dir", "--resume")


def nothing_left(recipe: Recipe, run: RunDir) -> str | None:
    """Says that all steps are done and exported; None where the ranks have something to do, or nothing tells."""
    try:
        return _nothing_left(recipe, run)
    except (DamagedFile, KeyError, TypeError):
        return None


def _nothing_left(recipe: Recipe, run: RunDir) -> str | None:
    wanted = recipe.train.max_steps
    if wanted is None and run.steps.exists():
        begun = read_json(run.steps)
        wanted = begun["max_steps"] if begun["epochs"] == recipe.train.epochs else None
    saved = run.complete_checkpoints()
    if wanted is None or not saved or not run.summary.exists() or not run.export.exists():
        return None
    done = saved[-1][
        0
    ]  # not the summary's: who takes the last checkpoint away wants to go on from the one before
    if (
        read_json(run.summary)["steps"] != done
    ):  # of a shorter training: this one ended before its export
        return None
    if done >= wanted:
        return f"nothing to train: {done} of {wanted} steps are done"
    early = read_json(run.summary).get("stopped_early")
    asked = recipe.train.stop_after
    if early is None or asked is None:
        return None
    same = (asked.metric, direction(asked), asked.evaluations) == (
        early["metric"],
        early["mode"],
        early["evaluations"],
    )
    return (
        f"nothing to train: stopped early after step {done} of {wanted} (train.stop_after)"
        if same
        else None
    )


def with_next(
    said: str, typed: Sequence[str], recipe: Recipe, run: RunDir, stopped: bool = False
) -> str:
    """The text, and where `train` was typed the whole command that continues the run.

    Args:
        said: how the run ended.
        typed: the words after `ortlaunch`.
        stopped: before its last step, so that it continues to the length it has; else it gets twice that length.
    """
    if typed[:1] != ["train"] or not (stopped or run.summary.exists()):
        return said
    key, value = ("", "") if stopped else _further(recipe, read_json(run.summary))
    change = [f"{key}={value}"] if key else []
    command = shlex.join(["ortlaunch", *_kept(typed, key), f"--run-dir={run}", *change])
    return f"{said}\n{CONTINUE}{command}"


def _further(recipe: Recipe, summary: Mapping[str, Any]) -> tuple[str, str]:
    """The override, as key and value, with which a finished run has something to train."""
    if summary.get("stopped_early"):
        return "train.stop_after", "null"
    if recipe.train.epochs:
        return "train.epochs", f"{2 * max(recipe.train.epochs, int(summary.get('epochs', 0))):g}"
    return "train.max_steps", str(2 * summary["steps"])


def _kept(typed: Sequence[str], key: str) -> Iterator[str]:
    """The words without the run's folder, where it began (`--resume never` would begin anew), and the key that changes.

    `train.epochs=null` stays beside `train.max_steps`: the recipe's file may have epochs.
    """
    changed = (f"{key}=", f"{key}.") if key else ()
    words = iter(typed)
    for word in words:
        if word in _PLACES:
            next(words, None)
        elif not word.startswith((*(f"{place}=" for place in _PLACES), *changed)):
            yield word
