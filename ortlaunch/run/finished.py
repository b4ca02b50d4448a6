"""A run that ended well: what to type to train it further, and whether another start has anything left to train."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from ortlaunch.errors import DamagedFile
from ortlaunch.recipe import Recipe
from ortlaunch.recipe.best import direction
from ortlaunch.run.folder import RunDir, read_json

_EARLY = "train.stop_after"
_PLACES = ("--run-dir", "--resume")
_LENGTHS = ("train.max_steps=", "train.epochs=")


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
    done = saved[-1][0]  # not the summary's: who takes the last checkpoint away wants to go on from the one before
    if read_json(run.summary)["steps"] != done:  # of a shorter training: this one ended before its export
        return None
    if done >= wanted:
        return f"nothing to train: {done} of {wanted} steps are done"
    early, asked = read_json(run.summary).get("stopped_early"), recipe.train.stop_after
    if early is None or asked is None:
        return None
    same = (asked.metric, direction(asked), asked.evaluations) == (early["metric"], early["mode"], early["evaluations"])
    return f"nothing to train: stopped early after step {done} of {wanted} (train.stop_after)" if same else None


def with_next(said: str, typed: Sequence[str], recipe: Recipe, run: RunDir) -> str:
    """The text, and the command that trains for twice as long: the typed one with its folder, where it was train."""
    if typed[:1] != ["train"] or not run.summary.exists():
        return said
    epochs, summary = recipe.train.epochs, read_json(run.summary)
    length = f"train.epochs={2 * epochs:g}" if epochs else f"train.max_steps={2 * summary['steps']}"
    if summary.get("stopped_early"):
        typed, length = [word for word in typed if not word.startswith(_EARLY)], f"{_EARLY}=null"
    return f"{said}\nto train on: {shlex.join(['ortlaunch', *_kept(typed), f'--run-dir={run}', length])}"


def _kept(typed: Sequence[str]) -> Iterator[str]:
    """The words without the run's folder and length, and where it began: `--resume never` would begin anew."""
    words = iter(typed)
    for word in words:
        if word in _PLACES:
            next(words, None)
        elif not word.startswith((*(f"{place}=" for place in _PLACES), *_LENGTHS)):
            yield word
