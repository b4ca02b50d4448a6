"""The status of a run for another process: its job's state, newest metrics and verdict."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from ortlaunch.base.errors import DamagedFile, InputError, LaunchError, MissingDependency
from ortlaunch.base.json_types import Json
from ortlaunch.base.process import name_by_stopped_process_id_in_tree
from ortlaunch.base.units import clock_duration, count_with_noun, number_or_none
from ortlaunch.diagnose.conclude import conclude_run_whose_command_vanished
from ortlaunch.launch import JobState
from ortlaunch.launch.processes import job_state
from ortlaunch.launch.record import JobRecord, current_time_iso
from ortlaunch.launch.stop import PRUNER
from ortlaunch.launch_plan import Plan
from ortlaunch.run_folder import lock
from ortlaunch.run_folder.engine_report import EngineChoice
from ortlaunch.run_folder.error_record import first_error_record, ranks_whose_supervisor_started
from ortlaunch.run_folder.folder import (
    RunDir,
    json_text,
    read_json_or_raise_damaged,
    read_text_or_raise_damaged,
)
from ortlaunch.run_folder.lines import read_json_lines_in_tail_or_whole_if_damaged
from ortlaunch.run_folder.origin import planned_or_recorded_step_count_or_none
from ortlaunch.run_folder.records import record_from_json_values
from ortlaunch.run_folder.verdict import Verdict
from ortlaunch.started_runs import queued, registry

_T = TypeVar("_T")
_POLL_SECONDS = 0.5
# Bytes at the end of metrics.jsonl that are read: more than the newest line of each kind needs.
_TAIL_BYTES = 1 << 16
# Lines of the output of a command that wrote no job.json.
_VERDICT_LINES = 20
_FORMAT_BY_METRIC = {
    "loss": "loss {:.4f}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "samples_per_second": "{:,.1f} samples/s",
}


@dataclass(frozen=True)
class Status:
    """The state of a run at one moment; unknown values are None."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}

    run: str
    """The run folder."""
    purpose: str
    """`train`, `parity`, `evaluate`, ..., or `trial` for a run of a sweep."""
    state: JobState
    """`pending`, `running`, `preempted` (saved; run it again), `cancelled`, `succeeded` or `failed`."""
    job: JobRecord
    """job.json, with the verdict that its command would have written."""
    certain: bool
    """False if its process is on another host; `state` is then the last recorded one."""
    seconds: float | None
    """From the start until now, or until the end."""
    ranks: int | None
    """Ranks of the plan."""
    ranks_begun: int
    """Ranks whose process has begun."""
    hosts: int | None
    """Hosts of the plan."""
    step: int | None
    """The last logged step."""
    steps: int | None
    """Steps of the whole training."""
    logged_seconds_ago: float | None
    """From the newest metrics of this start until now."""
    metrics: Json
    """The newest value of each name."""
    alive: tuple[int, ...]
    """Processes on this host that have not ended, although the run has."""
    stopped: Mapping[int, str]
    """Names of processes of a running run on this host that SIGSTOP or Ctrl-Z has stopped, by id."""
    unreadable: tuple[str, ...] = ()
    """Errors of damaged files, which were left out."""
    fallback: str | None = None
    """Why another engine than the requested one runs, as a sentence."""
    best: Json | None = None
    """Of a training that succeeded, as in summary.json."""
    stopped_early: Json | None = None
    """The same, where it stopped early."""

    def to_json(self) -> str:
        """Return the status as one JSON object."""
        job = {**asdict(self.job), "state": self.job.state.value}
        return json_text({**asdict(self), "state": self.state.value, "job": job}, indent=2)

    def __str__(self) -> str:
        """Return lines for a person: state, ranks, progress, verdict."""
        return "\n".join(
            line
            for line in (
                self._state_and_location_headline(),
                *self._doubt_rank_step_attempt_and_verdict_lines(),
            )
            if line
        )

    @property
    def state_name(self) -> str:
        """The state for a person: `pruned` for a trial that its sweep ended early."""
        return "pruned" if self.is_pruned else self.state.value

    @property
    def is_pruned(self) -> bool:
        """Whether the run is a trial that its sweep ended early."""
        return self.job.verdict is not None and self.job.verdict.stopped_by == PRUNER

    def end_text(self, has_details: bool = True) -> str:
        """Return the scheduler's words and the verdict; "" for a run that has not ended.

        Args:
            has_details: whether the traceback and the table of memory are in it.
        """
        verdict_text = self.job.verdict.render(has_details) if self.job.verdict else ""
        return "\n".join(filter(None, (self.job.queue_state, verdict_text)))

    @property
    def early_stop_and_best_line(self) -> str:
        """A line on an early stop and on the best checkpoint; "" without them."""
        best_record = self.stopped_early or self.best or {}
        value = number_or_none(best_record.get("value"))
        early_stop_text = (
            f"stopped early after step {self.step} of {self.steps}" if self.stopped_early else ""
        )
        metric_text = (
            f"best {best_record['metric']} {value:.6g} after step {best_record['step']}"
            if value is not None
            else ""
        )
        return ": ".join(filter(None, (early_stop_text, metric_text)))

    def _state_and_location_headline(self) -> str:
        duration_text = (
            ""
            if self.seconds is None
            else f" {'after' if self.state.is_end else 'for'} {clock_duration(self.seconds)}"
        )
        end_text = f", ended {_time_text(self.job.ended)}" if self.job.ended else ""
        exit_status_text = (
            "" if self.job.exit_status is None else f", exit status {self.job.exit_status}"
        )
        location_text = (
            f"launcher {self.job.backend}, process {self.job.id} on host {self.job.host}"
        )
        location_text = (
            f"job {self.job.id} of {self.job.backend}"
            if queued.is_queued(self.job)
            else location_text
        )
        purpose_text = "" if self.purpose == registry.TRAINING_PURPOSE else f" ({self.purpose})"
        return (
            f"{self.run}{purpose_text}: {self.state_name}{duration_text}{exit_status_text} "
            f"(started {_time_text(self.job.started)}{end_text}; {location_text})"
        )

    def _doubt_rank_step_attempt_and_verdict_lines(self) -> Iterator[str]:
        if not self.certain:
            yield f"this is the last recorded state; {advice_for_other_host(self.job, self.run, 'status')}"
        if self.ranks is not None and self.hosts is not None:
            begun_text = (
                f"; {self.ranks_begun} have started" if self.ranks_begun < self.ranks else ""
            )
            yield f"{count_with_noun(self.ranks, 'rank')} on {count_with_noun(self.hosts, 'host')}{begun_text}"
        is_pending = self.state is JobState.PENDING
        if is_pending and not queued.is_queued(self.job):
            yield "its ranks have not started: the command still measures or prepares"
        elif not is_pending or self.step is not None:
            yield self._last_step_and_metrics_text()
        yield self.early_stop_and_best_line
        for pid, process_name in self.stopped.items():
            yield f"process {pid} ({process_name}) is stopped, and the run waits for it: kill -CONT {pid}"
        if self.alive:
            yield f"still ending: {', '.join(f'process {pid}' for pid in self.alive)}"
        yield from self._attempt_lines()
        if self.fallback:
            yield self.fallback
        yield from self.unreadable
        yield self.end_text(has_details=False)

    def _attempt_lines(self) -> Iterator[str]:
        """Yield a line for each failed start of the ranks, and the number of the current one."""
        for attempt in self.job.attempts:
            step_text = "" if attempt.step is None else f" after step {attempt.step}"
            yield f"attempt {attempt.number} failed{step_text}, in {clock_duration(attempt.seconds)}: {attempt.message}"
        if self.job.attempts and self.state is JobState.RUNNING:
            yield f"attempt {len(self.job.attempts) + 1} runs"

    def _last_step_and_metrics_text(self) -> str:
        if self.step is None:
            return "no step is logged yet" if not self.state.is_end else "no step was logged"
        total_text = f" of {self.steps}" if self.steps is not None else ""
        values_by_format = (
            (value_format, number_or_none(self.metrics.get(name)))
            for name, value_format in _FORMAT_BY_METRIC.items()
        )
        values = [
            value_format.format(value)
            for value_format, value in values_by_format
            if value is not None
        ]
        seconds_ago = self.logged_seconds_ago
        time_text = (
            ""
            if self.state.is_end
            else ", of an earlier start"
            if seconds_ago is None
            else f", {clock_duration(seconds_ago)} ago"
        )
        return ", ".join([f"step {self.step}{total_text}", *values]) + time_text


def read_status(run: RunDir, ask_queue: queued.Queue = queued.ask_scheduler) -> Status:
    """Return the current status of a run.

    Args:
        ask_queue: returns the state of a job in its queue; a list of runs shares a SharedQueue.

    Raises:
        InputError: the folder is not that of a run, or this user may not read its files.
    """
    try:
        return _read_status_noting_damage(run, ask_queue)
    except PermissionError as error:
        raise InputError(
            f"{error.filename}: no permission to read it; use the user who started the run"
        ) from None


def poll_status_until_run_end(
    run: RunDir, on_status: Callable[[Status], object] | None = None
) -> Status:
    """Wait for the end of a run and return its final status.

    Args:
        on_status: called with each status that is read, twice a second.

    Raises:
        InputError: as `read_status`; or the end cannot be detected from this host.
    """
    while True:
        status = read_status(run)
        if on_status is not None:
            on_status(status)
        if status.state.is_end:
            return status
        if not status.certain:
            raise InputError(advice_for_other_host(status.job, run, "status --wait"))
        time.sleep(_POLL_SECONDS)


def advice_for_other_host(job: JobRecord, run: RunDir | str, command_verb: str) -> str:
    """Return the advice for a job whose process cannot be seen from this host."""
    location_text = f"process {job.id} on host {job.host} cannot be seen from here"
    return (
        f"{location_text}; use that host, or ssh: ssh {job.host} ortlaunch {command_verb} "
        f"{os.path.abspath(str(run))}"
    )


def _read_status_noting_damage(run: RunDir, ask_queue: queued.Queue) -> Status:
    recorded_job = _job_record_of_lock_holder_or_recorded_one(run)
    error_texts = list[str]()
    is_certain = (
        recorded_job.state.is_end or queued.is_queued(recorded_job) or recorded_job.process.is_here
    )
    job = (
        _read_or_note_error(
            error_texts,
            lambda: _job_record_with_live_state(run, recorded_job, ask_queue),
            recorded_job,
        )
        if is_certain
        else recorded_job
    )
    if job.verdict is not None and job.verdict.stopped_by == PRUNER:
        # A sweep does not count what a continued trial reaches.
        job = replace(job, verdict=replace(job.verdict, continue_command=None))
    plan = _read_or_note_error(
        error_texts, lambda: Plan.read(run.plan) if run.plan.exists() else None, None
    )
    steps = _read_or_note_error(
        error_texts, lambda: planned_or_recorded_step_count_or_none(run), None
    )
    metrics = _newest_value_by_metric(run, error_texts)
    fallback = _read_or_note_error(error_texts, lambda: _engine_fallback_line_or_none(run), None)
    start_time = datetime.fromisoformat(job.started).timestamp()
    log_time = run.metrics.stat().st_mtime if metrics else 0.0
    summary: Json = _read_or_note_error(
        error_texts, lambda: _successful_result(job, run.summary), {}
    )
    evaluation_result: Json = _read_or_note_error(
        error_texts, lambda: _successful_result(job, run.evaluation), {}
    )
    # `evaluate` writes no metrics.jsonl.
    metrics |= {
        name if name == "step" else f"evaluation_{name}": value
        for name, value in evaluation_result.items()
    }
    return Status(
        run=str(run),
        purpose=registry.run_purpose_by_sweep_or_task(run),
        state=job.state,
        job=job,
        certain=is_certain,
        seconds=_elapsed_seconds(job, start_time),
        ranks=plan.world_size if plan else None,
        ranks_begun=len(ranks_whose_supervisor_started(run)) if run.request.exists() else 0,
        hosts=len(plan.nodes) if plan else None,
        step=metrics.pop("step", None),
        steps=steps,
        # Metrics from before the start are those of an earlier start.
        logged_seconds_ago=time.time() - log_time if log_time >= start_time else None,
        metrics=metrics,
        alive=tuple(lock.living_process_ids(run)) if job.state.is_end else (),
        stopped=_stopped_processes(job) if is_certain else {},
        unreadable=tuple(error_texts),
        fallback=fallback,
        best=summary.get("best"),
        stopped_early=summary.get("stopped_early"),
    )


def _engine_fallback_line_or_none(run: RunDir) -> str | None:
    """Return the sentence on the engine that replaced the requested one; None if none did."""
    engine_record = read_json_or_raise_damaged(run.engine) if run.engine.exists() else {}
    try:
        return (
            record_from_json_values(EngineChoice, engine_record["engine"]).fallback
            if "engine" in engine_record
            else None
        )
    except TypeError as error:
        raise DamagedFile(f"{run.engine}: {error}; delete it") from error


def _successful_result(job: JobRecord, result_path: Path) -> Json:
    return (
        read_json_or_raise_damaged(result_path)
        if job.state is JobState.SUCCEEDED and result_path.exists()
        else {}
    )


def _read_or_note_error(
    error_texts: list[str], read_value: Callable[[], _T], fallback_value: _T
) -> _T:
    """Return the result of `read_value`, or `fallback_value` after an error.

    The error is appended to `error_texts`.

    Such errors are those of damaged files and of a queue that does not answer.
    """
    try:
        return read_value()
    except (DamagedFile, LaunchError, MissingDependency) as error:
        if str(error) not in error_texts:
            error_texts.append(str(error))
        return fallback_value


def require_existing_run_folder(run: RunDir) -> None:
    """Raise InputError if the path is no folder."""
    if not run.path.is_dir():
        raise InputError(
            f"{run}: is neither a folder nor the name of a run; "
            "`ortlaunch list` prints the runs and their folders"
        )


def _job_record_of_lock_holder_or_recorded_one(run: RunDir) -> JobRecord:
    require_existing_run_folder(run)
    job = JobRecord.read_or_none_refusing_damaged(run)
    last_command = lock.process_that_last_locked_run(run)
    if job is not None and queued.is_queued(job):
        return job
    # A command that took the folder over replaces the job of an earlier one.
    if (
        last_command is not None
        and last_command.is_here
        and last_command.is_alive()
        and (job is None or job.process != last_command)
    ):
        # The command resolves or measures, and has not written its own job.json yet.
        return JobRecord(
            "local", str(last_command.pid), *last_command[1:], current_time_iso(), JobState.PENDING
        )
    if job is None and last_command is not None and run.output.exists():
        # It was started from Python, and ended before it wrote its own job.json.
        last_output = "".join(
            read_text_or_raise_damaged(run.output).splitlines(keepends=True)[-_VERDICT_LINES:]
        )
        job = JobRecord(
            "local", str(last_command.pid), *last_command[1:], current_time_iso(), JobState.FAILED
        )
        return job.copy_with_verdict(JobState.FAILED, Verdict(1, last_output))
    if job is None:
        raise InputError(f"{run}: has no job.json, so no run was started there")
    return job


def _job_record_with_live_state(run: RunDir, job: JobRecord, ask_queue: queued.Queue) -> JobRecord:
    """Return the record with the job's current state, and with a verdict if none was recorded."""
    if queued.is_queued(job):
        return queued.job_record_by_queue_recording_unrecorded_end(run, job, ask_queue)
    state = job_state(job)
    if not state.is_end or job.state.is_end:
        return replace(job, state=state)
    # The command may have recorded its end since the record was read.
    recorded_job = JobRecord.read_or_none_refusing_damaged(run)
    if (
        recorded_job is not None
        and recorded_job.process == job.process
        and recorded_job.state.is_end
    ):
        return recorded_job
    verdict = _deduced_verdict_on_unrecorded_run(run, job)
    return job.copy_with_verdict(JobState.state_of_exit_status(verdict.exit_status), verdict)


def _deduced_verdict_on_unrecorded_run(run: RunDir, job: JobRecord) -> Verdict:
    """Return the verdict on a run that no command recorded.

    Its command was killed, or the user's own launcher started the ranks.
    """
    first_record = first_error_record(run)
    if (job.has_completed_training(run) and (first_record is None or first_record.secondary)) or (
        job.backend == "inside" and _has_finished_parity_comparison(run)
    ):
        return Verdict(0, f"done: {run}")
    return conclude_run_whose_command_vanished(run, f"process {job.id} on host {job.host}")


def _has_finished_parity_comparison(run: RunDir) -> bool:
    """Whether `parity`, which writes no summary, ended by itself on rank 0, and no rank failed."""
    return (
        run.plan.exists()
        and Plan.read(run.plan).traits.compares
        and 0 in ranks_whose_supervisor_started(run)
        and not run.reserved_space_path(0).exists()
        and not any(run.errors.glob("rank_*.json"))
    )


def _stopped_processes(job: JobRecord) -> Mapping[int, str]:
    is_alive = not job.state.is_end and not queued.is_queued(job) and job.process.is_alive()
    return name_by_stopped_process_id_in_tree(job.process.pid) if is_alive else {}


def _elapsed_seconds(job: JobRecord, start_time: float) -> float | None:
    if job.state.is_end:
        return datetime.fromisoformat(job.ended).timestamp() - start_time if job.ended else None
    return time.time() - start_time


def _newest_value_by_metric(run: RunDir, error_texts: list[str]) -> Json:
    """Return the newest value of each metric; damaged lines are reported in `error_texts`."""
    # A last line that is only half written is skipped without a report.
    json_lines = read_json_lines_in_tail_or_whole_if_damaged(run.metrics, _TAIL_BYTES, "step")
    error_texts += json_lines.unreadable
    return {name: value for record in json_lines.values for name, value in record.items()}


def _time_text(iso_time: str) -> str:
    return iso_time.replace("T", " ")[:19]
