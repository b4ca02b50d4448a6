"""job.json: the record of a job in the run folder, during the job and after its end.

Written by the command that starts the ranks, or by rank 0 under the user's own launcher.
"""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime

from ortlaunch.base.cause import Cause
from ortlaunch.base.errors import InputError
from ortlaunch.base.process import Process
from ortlaunch.launch import JobState
from ortlaunch.rank import JOB_VARIABLE
from ortlaunch.run_folder.folder import RunDir, read_json_or_raise_damaged, write_json_atomically
from ortlaunch.run_folder.records import record_from_json_values
from ortlaunch.run_folder.verdict import Verdict


@dataclass(frozen=True)
class Attempt:
    """One failed start of the ranks, by a command that restarts them (`launch.max_restarts`)."""

    number: int
    """Number of the attempt, from 1."""
    seconds: float
    """Duration in seconds."""
    exit_status: int
    """The exit status that the command would have had without a restart."""
    cause: Cause
    """The cause of the failure."""
    message: str
    """The command's sentence on the end of the attempt."""
    failure: str
    """The exception or the exit status, which is compared with the attempt before."""
    step: int | None
    """Completed steps at the failure; null if unknown, or if no rank began."""
    checkpoint: int
    """Step of the newest complete checkpoint at the end of the attempt; 0 if there is none."""
    resumed: int
    """Step of the newest complete checkpoint at the start, from which the attempt resumed."""
    folder: str | None = None
    """Folder of its logs and errors, once another attempt has begun."""


@dataclass(frozen=True)
class JobRecord:
    """The contents of job.json."""

    backend: str
    """`local`, `torchrun`, `mpi`, `inside` for ranks of the user's own launcher, or a scheduler:
    `slurm`, `kubernetes`, `azureml`."""

    id: str
    """Process id of the command that waits for the ranks (with `inside`, of rank 0's supervisor),
    or the id of a scheduler's job."""

    host: str
    """The host of that process."""

    space: str
    """Host and process namespace in which the process id is valid."""

    began: str
    """Start time of the process as the kernel counts it; it differs for a later process with the
    same id."""

    started: str
    """Time at which the command took over the folder; ISO 8601."""

    state: JobState
    """The state as the command last wrote it; it stays the same after `kill -9` of the command."""

    ended: str | None = None
    """End of the run; ISO 8601. None before that."""

    exit_status: int | None = None
    """Exit status of the command, once the run has ended."""

    verdict: Verdict | None = None
    """How the run ended: cause, explanation, traceback and advice."""

    queue_state: str | None = None
    """The scheduler's words on the job: what it waits for, or how the scheduler ended it."""

    attempts: tuple[Attempt, ...] = ()
    """Failed starts of the ranks, whether or not the ranks were started again."""

    @classmethod
    def for_this_process(cls, backend: str, state: JobState) -> JobRecord:
        """Return the record of a job of this process."""
        me = Process.identity_of_this_process()
        return cls(backend, str(me.pid), me.host, me.space, me.began, current_time_iso(), state)

    @classmethod
    def for_this_process_or_its_queued_job(
        cls, run: RunDir, backend_name: str, job_state: JobState
    ) -> JobRecord:
        """Return the record of this process's job.

        If `ortlaunch submit` queued it, the record is that of the scheduler's job.
        """
        scheduler, _, job_id = os.environ.get(JOB_VARIABLE, "").partition(":")
        if not job_id:
            return cls.for_this_process(backend_name, job_state)
        queued = cls.read_or_none_refusing_damaged(run)
        started, failed = (queued.started, queued.attempts) if queued else (current_time_iso(), ())
        return cls(
            scheduler, job_id, socket.gethostname(), "", "", started, job_state, attempts=failed
        )

    @classmethod
    def read_or_none_refusing_damaged(cls, run: RunDir) -> JobRecord | None:
        """The record in a run folder, or None.

        Raises:
            InputError: the file is no record of a job.
        """
        try:
            value = read_json_or_raise_damaged(run.job)
            attempts = tuple(
                record_from_json_values(Attempt, {**attempt, "cause": Cause(attempt["cause"])})
                for attempt in value.get("attempts", ())
            )
            verdict = value.get("verdict") and Verdict.from_json(value["verdict"])
            state = JobState(value["state"])
            record = record_from_json_values(
                cls, {**value, "state": state, "verdict": verdict, "attempts": attempts}
            )
            # Fail here on damaged times and ids, not in a later caller.
            for time in (record.started, *(() if record.ended is None else (record.ended,))):
                datetime.fromisoformat(time).timestamp()
            if record.began:
                # The id of a scheduler's job need not be a number, a process id must be one.
                int(record.id)
            return record
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise InputError(f"{run.job}: is not a record of a job ({error}); delete it") from None

    @property
    def process(self) -> Process:
        """The process of the command."""
        return Process(int(self.id), self.host, self.space, self.began)

    def has_completed_training(self, run: RunDir) -> bool:
        """Return whether this job wrote the run's summary; one from before it is of an earlier job."""
        return (
            run.summary.exists()
            and run.summary.stat().st_mtime >= datetime.fromisoformat(self.started).timestamp()
        )

    def write(self, run: RunDir) -> None:
        """Write the record into the run folder."""
        write_json_atomically(run.job, {**asdict(self), "state": self.state.value})

    def copy_ended_now(self, end_state: JobState, verdict: Verdict) -> JobRecord:
        """Return the record of the same job, ended now."""
        return replace(self.copy_with_verdict(end_state, verdict), ended=current_time_iso())

    def copy_with_verdict(self, end_state: JobState, verdict: Verdict) -> JobRecord:
        """Return the record of the same job with a verdict; the time of its end is unknown."""
        return replace(self, state=end_state, exit_status=verdict.exit_status, verdict=verdict)


def current_time_iso() -> str:
    """Return the current local time with its offset; ISO 8601, in seconds."""
    return datetime.now(UTC).astimezone().isoformat(timespec="seconds")
