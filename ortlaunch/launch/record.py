"""job.json: a job as other processes find it in the run folder, while it lives and after it has ended.

Written by the command that starts the ranks, or by rank 0 under a launcher of the user's own.
"""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone

from ortlaunch.cause import Cause, Failure
from ortlaunch.errors import InputError
from ortlaunch.launch import JobState
from ortlaunch.process import Process
from ortlaunch.rank import JOB_VARIABLE
from ortlaunch.run_folder.folder import RunDir, read_json, write_json
from ortlaunch.run_folder.records import from_json


@dataclass(frozen=True)
class Attempt:
    """One start of the ranks that failed, of a command that restarts them (`launch.max_restarts`)."""

    number: int
    """From 1."""
    seconds: float
    """From start to end."""
    exit_status: int
    """What the command would have left with."""
    cause: Cause
    """Why it failed."""
    verdict: str
    """What the command said last of it."""
    failure: str
    """What is compared with the attempt before: the exception, or the exit status."""
    step: int | None
    """Steps that were done when it failed; null: not known, or no rank began."""
    checkpoint: int
    """Step of the newest complete checkpoint at its end; 0: none."""
    resumed: int
    """The same at its start, from which it went on."""
    folder: str | None = None
    """Where its logs and errors are, once another attempt has begun."""


@dataclass(frozen=True)
class JobRecord:
    """What job.json holds."""

    backend: str
    """`local`, `torchrun`, `mpi`, `inside` for ranks of a launcher of the user's own, or a scheduler: `slurm`,
    `kubernetes`, `azureml`."""

    id: str
    """The process id of the command, which waits for the ranks (of rank 0's supervisor with `inside`); of a
    scheduler's job."""

    host: str
    """The host of that process."""

    space: str
    """Host and namespace in which the process id means that process."""

    began: str
    """When the process began, in the kernel's count: a later process with the same id has another."""

    started: str
    """When the command took the folder; ISO 8601."""

    state: JobState
    """As the command last wrote it; after `kill -9` of the command it stays what it was."""

    ended: str | None = None
    """When the run ended; ISO 8601. None before that."""

    exit_status: int | None = None
    """The command's, once the run has ended."""

    verdict: str | None = None
    """What the command said last."""

    failure: Failure | None = None
    """Why it failed, once it has."""

    attempts: tuple[Attempt, ...] = ()
    """Starts of the ranks that failed, after each of which they were started again, or not."""

    @classmethod
    def of_this_process(cls, backend: str, state: JobState) -> JobRecord:
        """The record of a job that this process has."""
        me = Process.this()
        return cls(backend, str(me.pid), me.host, me.space, me.began, now(), state)

    @classmethod
    def begun(cls, run: RunDir, backend: str, state: JobState) -> JobRecord:
        """The record of this process's job: the scheduler's, where one that `ortlaunch submit` queued started it."""
        scheduler, _, number = os.environ.get(JOB_VARIABLE, "").partition(":")
        if not number:
            return cls.of_this_process(backend, state)
        queued = cls.read(run)
        started, failed = (queued.started, queued.attempts) if queued else (now(), ())
        return cls(scheduler, number, socket.gethostname(), "", "", started, state, attempts=failed)

    @classmethod
    def read(cls, run: RunDir) -> JobRecord | None:
        """The record in a run folder, or None.

        Raises:
            InputError: the file is none of ours.
        """
        try:
            value = read_json(run.job)
            attempts = tuple(
                from_json(Attempt, {**one, "cause": Cause(one["cause"])})
                for one in value.get("attempts", ())
            )
            failure = Failure.from_json(value["failure"]) if value.get("failure") else None
            state = JobState(value["state"])
            record = from_json(
                cls, {**value, "state": state, "failure": failure, "attempts": attempts}
            )
            for time in filter(None, (record.started, record.ended)):
                datetime.fromisoformat(time)
            if record.began:
                int(record.id)  # of a process
            return record
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(f"{run.job}: is no record of a job ({error}); delete it") from None

    @property
    def process(self) -> Process:
        """The command."""
        return Process(int(self.id), self.host, self.space, self.began)

    def write(self, run: RunDir) -> None:
        """Put it into the run folder."""
        write_json(run.job, {**asdict(self), "state": self.state.value})

    def at_end(
        self, state: JobState, exit_status: int, verdict: str, failure: Failure | None = None
    ) -> JobRecord:
        """The same job, ended now."""
        return replace(
            self,
            state=state,
            ended=now(),
            exit_status=exit_status,
            verdict=verdict,
            failure=failure,
        )


def now() -> str:
    """The time of day, for a record."""
    return datetime.now(timezone.utc).astimezone().isoformat(timespec="seconds")
