"""Run the trials of a sweep: each is a run in its own folder.

The command of a trial ends with this one; a job of Slurm goes on without it.
"""

from __future__ import annotations

import contextlib
import math
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

from ortlaunch.api.inputs import LoadedRecipe
from ortlaunch.api.runs import Run
from ortlaunch.api.trial_starts import QueuedTrial, Share, queued, start
from ortlaunch.errors import InputError, OrtlaunchError, RunError
from ortlaunch.launch.stop import PRUNER
from ortlaunch.other_runs import requests
from ortlaunch.rank import EXIT_SAVED
from ortlaunch.recipe.space import assignments
from ortlaunch.run_folder import lock
from ortlaunch.run_folder.folder import RunDir, write_text_atomically
from ortlaunch.run_folder.lines import read_json_lines
from ortlaunch.search.folder import SweepDir
from ortlaunch.search.study import Study
from ortlaunch.units import number_or_none

Objective = Callable[[Run], float]
_POLL_SECONDS = 0.5
# Failed trials, and no complete one, after which a sweep ends: the fault is not the values'.
_FIRST_FAILURES = 3
# Trials in a row with values of earlier ones, after which a sweep ends.
_REPEATS = 10
# Starts of a stopped or killed trial without a further checkpoint, after which it has failed.
_MOST_STARTS = 3
_KILLED = (EXIT_SAVED, *(128 + one for one in (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)))


@dataclass
class _Started:
    """A trial that runs now."""

    number: int
    slot: int
    """The number of its share, from 0."""
    process: subprocess.Popen[bytes] | QueuedTrial
    starts: int
    """Starts since its newest checkpoint."""
    saved: int
    """Step of that checkpoint."""


class Trials:
    """The trials of a sweep, for the process that has its lock."""

    def __init__(
        self,
        loaded: LoadedRecipe,
        shares: list[Share],
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
        self._until = time.monotonic() + 3600 * hours if hours else None
        self._running = list[_Started]()

    def run(self) -> None:
        """Start trials until a limit, and wait for their ends.

        An exception, as of an interrupt, lets them save and end first.
        """
        waiting = [one.number for one in self._study.trials() if one.state == "running"]
        try:
            while True:
                while len(self._running) < self._study.sweep.parallel and (
                    waiting or self._wants_more()
                ):
                    self._start(self._study.draw(waiting.pop(0) if waiting else None))
                if not self._running:
                    return
                time.sleep(_POLL_SECONDS)
                for one in list(self._running):
                    self._update(one)
        finally:
            for one in self._running:
                one.process.terminate()
            for one in self._running:
                one.process.wait()

    def _wants_more(self) -> bool:
        """Return whether no limit forbids another trial."""
        known = self._study.trials()
        steps = self._study.sweep.steps
        failed = sum(one.state == "fail" for one in known)
        return (
            (self._study.sweep.most is None or len(known) < self._study.sweep.most)
            and (
                steps is None
                or sum(_steps(self._folder.trial(one.number)) for one in known) < steps
            )
            and (self._until is None or time.monotonic() < self._until)
            and (failed < _FIRST_FAILURES or failed < len(known))
            # A finite space may have no further values.
            and (len(known) < _REPEATS or not all(one.repeats for one in known[-_REPEATS:]))
        )

    def _start(self, trial: int, starts: int = 0, saved: int = 0) -> None:
        """Start a trial's run, or continue it.

        Args:
            starts: earlier starts since the checkpoint of step `saved`.
        """
        run = self._folder.trial(trial)
        # The first start of this command: an earlier one may have queued the trial.
        job = None if starts else queued(run)
        # Of a sweep that was killed; they save and end.
        while job is None and lock.living_process_ids(run):
            time.sleep(_POLL_SECONDS)
        if job is None and self._study.attribute(trial, "pruned"):
            self._end(trial, "pruned")
            return
        if job is None and run.was_stopped_by_user():
            self._complete(trial)
            return
        twin = None if run.path.exists() else self._study.twin(trial)
        if twin is not None:
            values = (*twin.values.values(),) if twin.state == "complete" else None
            self._end(
                trial, twin.state, values, f"not trained: trial {twin.number} has these values"
            )
            return
        slots = set(range(self._study.sweep.parallel)) - {one.slot for one in self._running}
        slot = min(slots)
        fields = self._study.trials()[trial].fields
        newest = _newest(run)
        starts = 1 if newest > saved else starts + 1
        try:
            # Inside a job its own launcher counts.
            launcher = ["launch.launcher=auto"] if self._study.sweep.submit else []
            loaded = self._loaded._replace(
                file=self._loaded.file.with_overrides(*assignments(fields), *launcher),
                is_file=False,
            )
            process = job or start(loaded, self._shares[slot], run)
        except OrtlaunchError as error:
            # Killed before its record was written.
            killed = isinstance(error, RunError) and _is_killed(error.exit_status)
            if killed and starts < _MOST_STARTS:
                self._start(trial, starts, newest)
            else:
                self._end(trial, "fail", reason=str(error))
            return
        self._running.append(_Started(trial, slot, process, starts, newest))

    def _update(self, one: _Started) -> None:
        """Prune a trial after a bad evaluation; if it has ended, record that or continue it."""
        code = one.process.poll()
        run = self._folder.trial(one.number)
        measured = self._evaluations(run)
        single = len(self._study.sweep.metrics) == 1
        first = {place: values[0] for place, values in measured.items()}
        if single and self._study.report(one.number, first) and code is None:
            # Recorded first: a sweep that is killed now does not continue the trial.
            self._study.set_attributes(one.number, pruned=len(measured))
            # It may be at its end.
            with contextlib.suppress(InputError):
                requests.stop(run, wait=False, by=PRUNER)
        if code is None:
            return
        self._running.remove(one)
        pruned = self._study.attribute(one.number, "pruned")
        # A hook, or `ortlaunch stop`, has ended the trial for good.
        if code == 0 or (code == EXIT_SAVED and not pruned and run.was_stopped_by_user()):
            self._complete(one.number)
        elif pruned:
            self._end(one.number, "pruned")
        elif _is_killed(code) and (one.starts < _MOST_STARTS or _newest(run) > one.saved):
            self._start(one.number, one.starts, one.saved)
        else:
            verdict = Run(run.path).status().job.verdict or f"exit status {code}"
            self._end(one.number, "fail", reason=verdict)

    def _complete(self, trial: int) -> None:
        measured = self._evaluations(self._folder.trial(trial))
        values = measured[max(measured)] if measured else ()
        if self._objective is not None:
            values = (float(self._objective(Run(self._folder.trial(trial).path))), *values[1:])
        # Not a number, as a diverged training has it.
        if not values or any(map(math.isnan, values)):
            names = ", ".join(one.metric for one in self._study.sweep.metrics)
            self._end(trial, "fail", reason=f"its last evaluation has no number for {names}")
            return
        self._end(trial, "complete", values)
        best = {self._folder.best(one.number): one.number for one in self._study.best()}
        for path in {*self._folder.path.glob("best_*.yaml")} - set(best):
            path.unlink()
        for path, number_of in best.items():
            write_text_atomically(
                path, self._folder.trial(number_of).recipe.read_text(encoding="utf-8")
            )

    def _end(
        self, trial: int, state: str, values: tuple[float, ...] | None = None, reason: str = ""
    ) -> None:
        steps = _steps(self._folder.trial(trial))
        self._study.set_attributes(trial, steps=steps, **({"reason": reason} if reason else {}))
        self._study.end(trial, state, values)
        if self._progress:
            ended = self._study.trials()[trial]
            print(f"trial {trial}: {state} after step {steps}: {ended.line()}", flush=True)

    def _evaluations(self, run: RunDir) -> dict[int, tuple[float, ...]]:
        """Return the metrics of each evaluation of a run, by its number from 1."""
        names = [f"evaluation_{one.metric}" for one in self._study.sweep.metrics]
        every = self._loaded.file.recipe.train.evaluate_every_steps
        rows = [line for line in read_json_lines(run.metrics, "step").values if names[0] in line]
        # A run that was stopped at the step of an evaluation has left that one out.
        return {
            math.ceil(row["step"] / every) if every else place: tuple(
                math.nan if (value := number_or_none(row.get(name))) is None else value
                for name in names
            )
            for place, row in enumerate(rows, 1)
        }


def _is_killed(code: int) -> bool:
    return code < 0 or code in _KILLED


def _newest(run: RunDir) -> int:
    """Return the step of the newest checkpoint; 0 if there is none."""
    return max((step for step, _ in run.complete_checkpoints()), default=0)


def _steps(run: RunDir) -> int:
    """Return the last step that a run has recorded."""
    return max(
        (int(line["step"]) for line in read_json_lines(run.metrics, "step").values), default=0
    )
