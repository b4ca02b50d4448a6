"""A sweep by its folder: its trials, its best ones, a table and a report; and its start."""

from __future__ import annotations

import os
from pathlib import Path

from ortlaunch.api.inputs import RecipeSource, load_recipe_with_path_and_overrides
from ortlaunch.api.plan import resolve_loaded_recipe
from ortlaunch.api.runs import write_report
from ortlaunch.api.trial_starts import divide_hosts_or_gpus_among_concurrent_trials
from ortlaunch.api.trials import Objective, TrialRunner
from ortlaunch.base.errors import InputError, PlanError, RunError
from ortlaunch.base.units import aligned_table_lines
from ortlaunch.planning.world import LaunchOptions
from ortlaunch.recipe import Recipe, dump_recipe_yaml, read_resolved_recipe_of_run
from ortlaunch.resolve.prepare import difference_texts
from ortlaunch.run_folder.folder import json_text, write_text_atomically
from ortlaunch.run_folder.lock import RunLock
from ortlaunch.search.folder import SweepDir
from ortlaunch.search.parallel import parallel_coordinates_picture_of_trials
from ortlaunch.search.study import Study, Trial, equal_result_sentence_or_empty

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
        self._recipe = read_resolved_recipe_of_run(self._folder.run.recipe)

    def __repr__(self) -> str:
        return f"Sweep({str(self.path)!r})"

    @property
    def path(self) -> Path:
        """The folder; docs/guides/sweep.md describes its files."""
        return self._folder.path

    def trials(self) -> list[Trial]:
        """Return all trials in the order of their numbers.

        Raises:
            MissingDependency: Optuna is not installed.
        """
        return Study(self._folder, self._recipe).read_trials()

    def best(self) -> list[Trial]:
        """Return the best complete trial; with several metrics all that no other trial beats."""
        return Study(self._folder, self._recipe).best_trials()

    def run(self, trial: int) -> Path:
        """Return the run folder of a trial, by its number."""
        return self._folder.trial_run_dir(trial).path

    def recipe(self, trial: int) -> Path:
        """Return the recipe of a best trial, by its number; `train` accepts it."""
        return self._folder.best_recipe_path(trial)

    def report(self, to: Path | None = None) -> Path:
        """Write one HTML page of the runs of all trials, and return its path.

        Args:
            to: the path; None: report.html in the sweep's folder.

        Raises:
            InputError: no trial has begun.
        """
        runs = [self._folder.trial_run_dir(trial.number) for trial in self.trials()]
        begun_folders = [run.path for run in runs if run.recipe.exists()]
        if not begun_folders:
            raise InputError(f"{self.path}: no trial has begun")
        study = Study(self._folder, self._recipe)
        picture_of_trials = parallel_coordinates_picture_of_trials(
            study.sweep,
            study.read_trials(),
            study.best_trials(),
            study.field_importances_or_empty(),
        )
        return write_report(begun_folders, to or self._folder.run.report, picture_of_trials)

    def to_json(self) -> str:
        """Return all trials as a JSON list, each with the path of its run folder."""
        rows = [{**trial._asdict(), "run": str(self.run(trial.number))} for trial in self.trials()]
        return json_text(rows, indent=2)

    def __str__(self) -> str:
        """Return a table of the trials and lines on the best, for a person."""
        trials = self.trials()
        rows = [
            (str(trial.number), trial.state, f"{trial.steps:,}", trial.line()) for trial in trials
        ]
        lines = aligned_table_lines([("trial", "state", "steps", "result"), *rows])
        for best_trial in self.best():
            lines.append(
                f"best: trial {best_trial.number}; its recipe: {self.recipe(best_trial.number)}"
            )
            if note := equal_result_sentence_or_empty(best_trial, trials):
                lines.append(f"  {note}")
        return "\n".join(lines)


def sweep(
    source: RecipeSource,
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
    launch_options = options or LaunchOptions()
    loaded = load_recipe_with_path_and_overrides(source, assignments, overrides)
    recipe = loaded.file.recipe
    if recipe.sweep is None:
        raise InputError(
            f"{loaded.given_path}: has no section sweep, which gives fields and values"
        )
    share_parts = divide_hosts_or_gpus_among_concurrent_trials(recipe, launch_options)
    resolve_loaded_recipe(loaded, share_parts[0].options, {**os.environ, **share_parts[0].environ})
    folder = SweepDir(Path("sweeps", recipe.name) if run_dir is None else Path(run_dir))
    with RunLock() as lock:
        lock.lock_and_record_holder_or_refuse(folder.run)
        _write_sweep_recipe_or_refuse_nonlimit_changes(folder, recipe)
        study = Study(folder, recipe, has_sweep_lock=True)
        TrialRunner(
            loaded, share_parts, folder, study, progress, objective
        ).run_trials_until_limit_terminating_them_on_error()
    ended_trials = study.read_trials()
    if ended_trials and all(trial.state == "fail" for trial in ended_trials):
        raise RunError(f"{folder}: all trials failed; {ended_trials[-1].line()}", 1)
    return Sweep(folder.path)


def _write_sweep_recipe_or_refuse_nonlimit_changes(sweep_folder: SweepDir, recipe: Recipe) -> None:
    """Write the sweep's recipe; an earlier one may differ in the limits alone.

    Raises:
        PlanError: it differs in other fields, or the folder is no sweep's.
    """
    if sweep_folder.run.plan.exists() or sweep_folder.run.job.exists():
        raise PlanError(f"--run-dir {sweep_folder}: is the folder of a run; give another one")
    if sweep_folder.journal.exists():
        earlier_values = read_resolved_recipe_of_run(sweep_folder.run.recipe).model_dump(
            mode="json"
        )
        changed_lines = difference_texts(earlier_values, recipe.model_dump(mode="json"))
        if forbidden_changes := [line for line in changed_lines if not line.startswith(_LIMITS)]:
            raise PlanError(
                f"{sweep_folder}: is the sweep of another recipe; give another --run-dir, or undo\n"
                + "\n".join(forbidden_changes)
            )
    write_text_atomically(sweep_folder.run.recipe, dump_recipe_yaml(recipe))
