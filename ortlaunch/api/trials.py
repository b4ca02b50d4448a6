"""Run the trials of a sweep: each is a run in its own folder.

The command of a trial ends with this one; a job of Slurm goes on without it.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from ortlaunch.api.inputs import LoadedRecipe
from ortlaunch.api.runs import Run
from ortlaunch.api.trial_starts import (
    TrialProcess,
    TrialResources,
    queued_trial_of,
    start_or_queue_trial,
)
from ortlaunch.base.errors import InputError, OrtlaunchError, RunError
from ortlaunch.base.units import number_or_none
from ortlaunch.launch.prepared import PreparedProcess
from ortlaunch.launch.stop import PRUNER
from ortlaunch.rank import EXIT_SAVED
from ortlaunch.recipe.space import trial_overrides
from ortlaunch.run_folder import lock
from ortlaunch.run_folder.folder import RunDir, write_text_atomically
from ortlaunch.run_folder.lines import read_json_lines_with_keys
from ortlaunch.run_folder.origin import planned_or_recorded_step_count_or_none
from ortlaunch.search.folder import SweepDir
from ortlaunch.search.study import Study
from ortlaunch.started_runs import requests

Objective = Callable[[Run], float]
_POLL_SECONDS = 0.2
# Failed trials, and no complete one, after which a sweep ends: the fault is not the values'.
_FIRST_FAILURES = 3
# Trials in a row with values of earlier ones, after which a sweep ends.
_REPEATS = 10
# Starts of a stopped or killed trial without a further checkpoint, after which it has failed.
_MOST_STARTS = 3
_KILLED = (EXIT_SAVED, *(128 + one for one in (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)))


@dataclass
class _RunningTrial:
    trial_number: int
    slot: int
    """The number of its share, from 0."""
    process: TrialProcess
    starts: int
    """Starts since its newest checkpoint."""
    saved_step: int
    """Step of that checkpoint."""


class TrialRunner:
    """The trials of a sweep, for the process that has its lock."""

    def __init__(
        self,
        loaded: LoadedRecipe,
        shares: list[TrialResources],
        folder: SweepDir,
        study: Study,
        progress: bool,
        objective: Objective | None = None,
    ) -> None:
        self._loaded = loaded
        self._shares = shares
        self._folder = folder
        self._study = study
        self._progress = progress
        self._objective = objective
        hours = study.sweep.hours
        self._deadline_seconds = time.monotonic() + 3600 * hours if hours else None
        self._running = list[_RunningTrial]()
        self._prepared_process = PreparedProcess()

    def run_trials_until_limit_terminating_them_on_error(self) -> None:
        """Start trials until a limit, and wait for their ends.

        An exception, as of an interrupt, lets them save and end first.
        """
        waiting = [trial.number for trial in self._study.read_trials() if trial.state == "running"]
        try:
            while True:
                while len(self._running) < self._study.sweep.parallel and (
                    waiting or self._may_draw_trial()
                ):
                    self._start_or_continue_trial_or_record_its_end(
                        self._study.draw_trial_values_and_return_number(
                            waiting.pop(0) if waiting else None
                        )
                    )
                if not self._running:
                    return
                time.sleep(_POLL_SECONDS)
                for trial in list(self._running):
                    self._request_pruning_or_record_end_or_restart_trial(trial)
        finally:
            for trial in self._running:
                trial.process.terminate()
            for trial in self._running:
                trial.process.wait()
            self._prepared_process.end()

    def _may_draw_trial(self) -> bool:
        all_trials = self._study.read_trials()
        steps = self._study.sweep.steps
        failed = sum(trial.state == "fail" for trial in all_trials)
        return (
            (self._study.sweep.max_trials is None or len(all_trials) < self._study.sweep.max_trials)
            and (
                steps is None
                or sum(
                    _last_recorded_step(self._folder.trial_run_dir(trial.number))
                    for trial in all_trials
                )
                < steps
            )
            and (self._deadline_seconds is None or time.monotonic() < self._deadline_seconds)
            and (failed < _FIRST_FAILURES or failed < len(all_trials))
            # A finite space may have no further values.
            and (
                len(all_trials) < _REPEATS
                or not all(trial.repeats for trial in all_trials[-_REPEATS:])
            )
        )

    def _start_or_continue_trial_or_record_its_end(
        self, trial_number: int, starts_since_checkpoint: int = 0, saved_step: int = 0
    ) -> None:
        """Start a trial's run, or continue it.

        Args:
            starts_since_checkpoint: earlier starts since the checkpoint of step `saved_step`.
        """
        run = self._folder.trial_run_dir(trial_number)
        # The first start of this command: an earlier one may have queued the trial.
        job = None if starts_since_checkpoint else queued_trial_of(run)
        # Of a sweep that was killed; they save and end.
        while job is None and lock.living_process_ids(run):
            time.sleep(_POLL_SECONDS)
        if job is None and self._study.trial_attribute(trial_number, "pruned"):
            self._record_and_print_trial_end(trial_number, "pruned")
            return
        if job is None and run.was_stop_requested_by_user_or_hook():
            self._record_result_and_update_best_recipes(trial_number)
            return
        twin = (
            None
            if run.path.exists()
            else self._study.earlier_complete_or_pruned_trial_with_equal_fields(trial_number)
        )
        if twin is not None:
            values = (*twin.values.values(),) if twin.state == "complete" else None
            self._record_and_print_trial_end(
                trial_number,
                twin.state,
                values,
                f"not trained: trial {twin.number} has these values",
            )
            return
        slots = set(range(self._study.sweep.parallel)) - {running.slot for running in self._running}
        slot = min(slots)
        fields = self._study.read_trials()[trial_number].fields
        newest = run.newest_checkpoint_step_or_zero()
        starts_since_checkpoint = 1 if newest > saved_step else starts_since_checkpoint + 1
        try:
            # Inside a job its own launcher counts.
            launcher = ["launch.launcher=auto"] if self._study.sweep.submit else []
            loaded = self._loaded._replace(
                file=self._loaded.file.copy_with_further_overrides(
                    *trial_overrides(fields), *launcher
                ),
                is_file=False,
            )
            process = job or start_or_queue_trial(
                loaded, self._shares[slot], run, self._prepared_process
            )
        except OrtlaunchError as error:
            # Killed before its record was written.
            killed = isinstance(error, RunError) and _was_killed(error.exit_status)
            if killed and starts_since_checkpoint < _MOST_STARTS:
                self._start_or_continue_trial_or_record_its_end(
                    trial_number, starts_since_checkpoint, newest
                )
            else:
                self._record_and_print_trial_end(trial_number, "fail", reason=str(error))
            return
        self._running.append(
            _RunningTrial(trial_number, slot, process, starts_since_checkpoint, newest)
        )

    def _request_pruning_or_record_end_or_restart_trial(self, running_trial: _RunningTrial) -> None:
        """Prune a trial after a bad evaluation; if it has ended, record that or continue it."""
        exit_status = running_trial.process.poll()
        run = self._folder.trial_run_dir(running_trial.trial_number)
        evaluations = self._sweep_metrics_or_nan_by_evaluation_number(run)
        has_single_metric = len(self._study.sweep.metrics) == 1
        first_metric_values = {
            evaluation_index: values[0] for evaluation_index, values in evaluations.items()
        }
        # The search is told of every evaluation; after the last one nothing is left to prune.
        is_bad = has_single_metric and self._study.report_values_and_decide_to_prune(
            running_trial.trial_number, first_metric_values
        )
        if (
            is_bad
            and exit_status is None
            and _last_recorded_step(run) < (planned_or_recorded_step_count_or_none(run) or math.inf)
        ):
            # Recorded first: a sweep that is killed now does not continue the trial.
            self._study.set_attributes(running_trial.trial_number, pruned=len(evaluations))
            # It may be at its end.
            with contextlib.suppress(InputError):
                requests.request_stop_and_wait_if_asked(run, waits_for_end=False, sender=PRUNER)
        if exit_status is None:
            return
        self._running.remove(running_trial)
        pruned = self._study.trial_attribute(running_trial.trial_number, "pruned")
        # A hook, or `ortlaunch stop`, has ended the trial for good.
        if exit_status == 0 or (
            exit_status == EXIT_SAVED and not pruned and run.was_stop_requested_by_user_or_hook()
        ):
            self._record_result_and_update_best_recipes(running_trial.trial_number)
        elif pruned:
            self._record_and_print_trial_end(running_trial.trial_number, "pruned")
        elif _was_killed(exit_status) and (
            running_trial.starts < _MOST_STARTS
            or run.newest_checkpoint_step_or_zero() > running_trial.saved_step
        ):
            self._start_or_continue_trial_or_record_its_end(
                running_trial.trial_number, running_trial.starts, running_trial.saved_step
            )
        else:
            reason = Run(run.path).status().end_text() or f"exit status {exit_status}"
            self._record_and_print_trial_end(running_trial.trial_number, "fail", reason=reason)

    def _record_result_and_update_best_recipes(self, trial_number: int) -> None:
        evaluations = self._sweep_metrics_or_nan_by_evaluation_number(
            self._folder.trial_run_dir(trial_number)
        )
        values = evaluations[max(evaluations)] if evaluations else ()
        if self._objective is not None:
            values = (
                float(self._objective(Run(self._folder.trial_run_dir(trial_number).path))),
                *values[1:],
            )
        # Not a number, as a diverged training has it.
        if not values or any(map(math.isnan, values)):
            names = ", ".join(sweep_metric.metric for sweep_metric in self._study.sweep.metrics)
            self._record_and_print_trial_end(
                trial_number, "fail", reason=f"its last evaluation has no number for {names}"
            )
            return
        self._record_and_print_trial_end(trial_number, "complete", values)
        best = {
            self._folder.best_recipe_path(sweep_metric.number): sweep_metric.number
            for sweep_metric in self._study.best_trials()
        }
        for path in {*self._folder.path.glob("best_*.yaml")} - set(best):
            path.unlink()
        for path, number_of in best.items():
            write_text_atomically(
                path, self._folder.trial_run_dir(number_of).recipe.read_text(encoding="utf-8")
            )

    def _record_and_print_trial_end(
        self,
        trial_number: int,
        end_state: str,
        metric_values: tuple[float, ...] | None = None,
        reason: str = "",
    ) -> None:
        steps = _last_recorded_step(self._folder.trial_run_dir(trial_number))
        self._study.set_attributes(
            trial_number, steps=steps, **({"reason": reason} if reason else {})
        )
        self._study.record_trial_end(trial_number, end_state, metric_values)
        if self._progress:
            ended_trial = self._study.read_trials()[trial_number]
            print(
                f"trial {trial_number}: {end_state} after step {steps}: {ended_trial.line()}",
                flush=True,
            )

    def _sweep_metrics_or_nan_by_evaluation_number(
        self, run: RunDir
    ) -> dict[int, tuple[float, ...]]:
        """Return the metrics of each evaluation of a run, by its number from 1."""
        names = [f"evaluation_{sweep_metric.metric}" for sweep_metric in self._study.sweep.metrics]
        every = self._loaded.file.recipe.train.evaluate_every_steps
        rows = [
            line
            for line in read_json_lines_with_keys(run.metrics, "step").values
            if names[0] in line
        ]
        # A run that was stopped at the step of an evaluation has left that one out.
        return {
            math.ceil(row["step"] / every) if every else evaluation_index: tuple(
                math.nan if (value := number_or_none(row.get(name))) is None else value
                for name in names
            )
            for evaluation_index, row in enumerate(rows, 1)
        }


def _was_killed(exit_status: int) -> bool:
    return exit_status < 0 or exit_status in _KILLED


def _last_recorded_step(run: RunDir) -> int:
    return max(
        (int(line["step"]) for line in read_json_lines_with_keys(run.metrics, "step").values),
        default=0,
    )
