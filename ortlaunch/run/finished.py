"""A run that ended: the command that continues it, and whether any training is left to do."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ortlaunch.errors import DamagedFile
from ortlaunch.recipe import Recipe
from ortlaunch.run_folder.cause_text import CONTINUE
from ortlaunch.run_folder.folder import RunDir, read_json

# Options that `with_next` leaves out or sets itself.
_PLACES = ("--run-dir", "--resume")


def nothing_left(recipe: Recipe, run: RunDir) -> str | None:
    """Return a line if all steps are complete and exported; None if not, or if that is unknown."""
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
    # Not the summary's steps: a user who deletes the last checkpoint wants to continue from the
    # one before it.
    done = saved[-1][0]
    # The summary is that of a shorter training: this one ended before its export.
    if read_json(run.summary)["steps"] != done:
        return None
    if done >= wanted:
        return f"nothing to train: {done} of {wanted} steps are done"
    early = read_json(run.summary).get("stopped_early")
    asked = recipe.train.stop_after
    if early is None or asked is None:
        return None
    same = (asked.metric, asked.direction, asked.evaluations) == (
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
    """Return the text; if the user typed `train`, with the command that continues the run.

    Args:
        said: the text on the end of the run.
        typed: the arguments after `ortlaunch`.
        stopped: whether it stopped before its last step. The command then continues to the same
            length, else to twice the length.
    """
    if tuple(typed[:1]) != ("train",) or not (stopped or run.summary.exists()):
        return said
    key, value = ("", "") if stopped else _further(recipe, read_json(run.summary))
    change = [f"{key}={value}"] if key else []
    command = shlex.join(["ortlaunch", *_kept(typed, key), f"--run-dir={run}", *change])
    return f"{said}\n{CONTINUE}{command}"


def _further(recipe: Recipe, summary: Mapping[str, Any]) -> tuple[str, str]:
    """Return the override, as key and value, that gives a finished run more to train."""
    # An early stop left steps to do, so that removing its condition is enough.
    if summary.get("stopped_early"):
        return "train.stop_after", "null"
    if recipe.train.epochs:
        return "train.epochs", f"{2 * max(recipe.train.epochs, int(summary.get('epochs', 0))):g}"
    return "train.max_steps", str(2 * summary["steps"])


def _kept(typed: Sequence[str], key: str) -> Iterator[str]:
    """Yield the typed arguments without the run's folder, the key that changes and `--dry-run`.

    Also without `--resume`: `--resume never` would train from the beginning again.

    `train.epochs=null` stays beside `train.max_steps`: the recipe's file may have epochs.
    """
    changed = ("--dry-run", *((f"{key}=", f"{key}.") if key else ()))
    words = iter(typed)
    for word in words:
        if word in _PLACES:
            next(words, None)
        elif not word.startswith((*(f"{place}=" for place in _PLACES), *changed)):
            yield word
