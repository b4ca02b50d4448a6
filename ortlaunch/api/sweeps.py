"""A sweep by its folder: its trials, its best ones, a table and a report; and its start."""

from __future__ import annotations

import os
from pathlib import Path

from ortlaunch.api.inputs import Source, read
from ortlaunch.api.plans import resolved
from ortlaunch.api.runs import write_report
from ortlaunch.api.trial_starts import shares
from ortlaunch.api.trials import Objective, Trials
from ortlaunch.errors import InputError, PlanError, RunError
from ortlaunch.planning.world import LaunchOptions
from ortlaunch.recipe import Recipe, read_resolved, to_yaml
from ortlaunch.resolve.prepare import differences
from ortlaunch.run_folder.folder import json_text, write_text_atomically
from ortlaunch.run_folder.lock import RunLock
from ortlaunch.search.folder import SweepDir
from ortlaunch.search.parallel import picture
from ortlaunch.search.study import Study, Trial, tie
from ortlaunch.units import align_columns

# Fields that may change when a sweep is continued.
_LIMITS = ("sweep.trials", "sweep.steps", "sweep.hours", "sweep.parallel")


class Sweep:
    """A sweep, which may be running; everything is read from its folder at each call."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Find a sweep by its folder.

        Raises:
            InputError: the folder is no sweep's.
        """
        self._folder = SweepDir(Path(path))
        if not self._folder.journal.exists():
            raise InputError(f"{path}: has no {self._folder.journal.name}: it is no sweep's folder")
        self._recipe = read_resolved(self._folder.run.recipe)

    def __repr__(self) -> str:
        return f"Sweep({str(self.path)!r})"

    @property
    def path(self) -> Path:
        """The folder; docs/sweep.md describes its files."""
        return self._folder.path

    def trials(self) -> list[Trial]:
        """Return all trials in the order of their numbers.

        Raises:
            MissingDependency: Optuna is not installed.
        """
        return Study(self._folder, self._recipe).trials()

    def best(self) -> list[Trial]:
        """Return the best complete trial; with several metrics all that no other trial beats."""
        return Study(self._folder, self._recipe).best()

    def run(self, trial: int) -> Path:
        """Return the run folder of a trial, by its number."""
        return self._folder.trial(trial).path

    def recipe(self, trial: int) -> Path:
        """Return the recipe of a best trial, by its number; `train` accepts it."""
        return self._folder.best(trial)

    def report(self, to: Path | None = None) -> Path:
        """Write one HTML page of the runs of all trials, and return its path.

        Args:
            to: the path; None: report.html in the sweep's folder.

        Raises:
            InputError: no trial has begun.
        """
        runs = [self._folder.trial(one.number) for one in self.trials()]
        begun = [run.path for run in runs if run.recipe.exists()]
        if not begun:
            raise InputError(f"{self.path}: no trial has begun")
        study = Study(self._folder, self._recipe)
        drawn = picture(study.sweep, study.trials(), study.best(), study.importances())
        return write_report(begun, to or self._folder.run.report, drawn)

    def to_json(self) -> str:
        """Return all trials as a JSON list, each with the path of its run folder."""
        rows = [{**one._asdict(), "run": str(self.run(one.number))} for one in self.trials()]
        return json_text(rows, indent=2)

    def __str__(self) -> str:
        """Return a table of the trials and lines on the best, for a person."""
        trials = self.trials()
        lines = align_columns([("trial", "state", "steps", "result"), *map(_row, trials)])
        for one in self.best():
            lines.append(f"best: trial {one.number}; its recipe: {self.recipe(one.number)}")
            if note := tie(one, trials):
                lines.append(f"  {note}")
        return "\n".join(lines)


def _row(one: Trial) -> tuple[str, ...]:
    return str(one.number), one.state, f"{one.steps:,}", one.line()


def sweep(
    source: Source,
    *assignments: str,
    run_dir: str | os.PathLike[str] | None = None,
    progress: bool = False,
    options: LaunchOptions | None = None,
    objective: Objective | None = None,
    **overrides: object,
) -> Sweep:
    """Run the trials of a recipe's section `sweep`, or continue them, and wait for the end.

    An interrupt lets the running trials save and end; another call continues them.

    Args:
        source, assignments, overrides: as in `load`.
        run_dir: the folder of the sweep; None: `sweeps/NAME`. An existing one is continued.
        progress: whether to print a line for each trial.
        options: launcher, hosts and ranks of each trial.
        objective: called with the run of each complete trial; it returns the value of the first
            metric, in place of its last evaluation. Pruners use evaluations in any case.

    Raises:
        InputError: recipe, hosts or folder are wrong, or Optuna is not installed. Nothing was
            started.
        RunError: all trials failed; the message is the last one's verdict.
    """
    chosen = options or LaunchOptions()
    loaded = read(source, assignments, overrides)
    recipe = loaded.file.recipe
    if recipe.sweep is None:
        raise InputError(f"{loaded.given}: has no section sweep, which gives fields and values")
    parts = shares(recipe, chosen)
    resolved(loaded, parts[0].options, {**os.environ, **parts[0].environ})
    folder = SweepDir(Path("sweeps", recipe.name) if run_dir is None else Path(run_dir))
    with RunLock() as lock:
        lock.acquire(folder.run)
        _record(folder, recipe)
        study = Study(folder, recipe, writes=True)
        Trials(loaded, parts, folder, study, progress, objective).run()
    ended = study.trials()
    if ended and all(one.state == "fail" for one in ended):
        raise RunError(f"{folder}: all trials failed; {ended[-1].line()}", 1)
    return Sweep(folder.path)


def _record(folder: SweepDir, recipe: Recipe) -> None:
    """Write the sweep's recipe; an earlier one may differ in the limits alone.

    Raises:
        PlanError: it differs in other fields, or the folder is no sweep's.
    """
    if folder.run.plan.exists() or folder.run.job.exists():
        raise PlanError(f"--run-dir {folder}: is the folder of a run; give another one")
    if folder.journal.exists():
        before = read_resolved(folder.run.recipe).model_dump(mode="json")
        found = differences(before, recipe.model_dump(mode="json"))
        if changed := [line for line in found if not line.startswith(_LIMITS)]:
            raise PlanError(
                f"{folder}: is the sweep of another recipe; give another --run-dir, or undo\n"
                + "\n".join(changed)
            )
    write_text_atomically(folder.run.recipe, to_yaml(recipe))
