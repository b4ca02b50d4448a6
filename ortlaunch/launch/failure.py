"""How a run ended: its first failing rank, the exit status and the text printed for it.

Everything is read from the run folder.
"""

from __future__ import annotations

import contextlib
import re
import signal
from typing import NamedTuple

from ortlaunch.cause import Cause, Failure
from ortlaunch.errors import DamagedFile
from ortlaunch.json_types import Json, read_regular
from ortlaunch.launch_plan import Plan
from ortlaunch.rank import EXIT_SAVED
from ortlaunch.run_folder.cause_text import OURS, TRY, VERDICT, sentence
from ortlaunch.run_folder.folder import RunDir, account, is_full, read_json
from ortlaunch.run_folder.library_messages import cause_in

# Lines of the user's exception that begin like ortlaunch's own output. They are indented, so that
# a reader or a script does not take them for ortlaunch's.
_LIKE_OURS = re.compile(f"^(?={OURS}|{VERDICT}|{TRY})", re.MULTILINE)


class End(NamedTuple):
    """The end of a run, and the text that the command prints for it."""

    status: int
    """The command's exit status."""
    last: str
    """The last output: one line, and the location of the logs."""
    failure: Failure | None = None
    """The cause of the failure; None if the run ended well."""
    before: str = ""
    """Text printed before `last`, such as a traceback; it ends with the line feeds before `last`."""
    stopped: bool = False
    """Whether the run stopped on request, with a checkpoint from which it can continue."""

    @property
    def text(self) -> str:
        """The complete text."""
        return f"{self.before}{OURS if self.status else ''}{self.last}"

    def followed_by(self, line: str) -> End:
        """Return the same end with one more line of output."""
        return self._replace(last=line, before=f"{self.text}\n")

    @classmethod
    def of(cls, status: int, failure: Failure, more: str = "") -> End:
        """Return the end for a failure that the command detected.

        Args:
            more: text printed after the failure's sentence.
        """
        return cls(status, f"{sentence(failure)}{more}", failure)


def explain_end(
    run: RunDir,
    status: int,
    stopped_by: int | None = None,
    ended_by: int | None = None,
    oom_kills: int | None = None,
    shown: bool = False,
) -> End:
    """Return the end of a run whose launcher exited with `status`.

    Args:
        stopped_by: the signal that the user sent to the command, if any.
        ended_by: the signal that ended the launcher itself, if any.
        oom_kills: processes of this control group that the kernel's out-of-memory killer ended
            during the run; None if unknown.
        shown: whether rank 0's output went to the terminal, so that its end is not printed again.
    """
    unrequested = stopped_by is None and not run.stop_request.exists()
    if run.stopped.exists():
        # The ranks saved because their launcher was killed.
        return _saved(run, stopped_by, ended_by == signal.SIGKILL and unrequested)
    records = _records(run)
    first = _first(records)
    on_request = first is not None and first["cause"] is Cause.STOPPED
    launcher_error = _launcher_failure(run)
    # A rank's stop or secondary failure is then the effect of the launcher's own failure.
    if launcher_error and unrequested and (first is None or on_request or first["secondary"]):
        cause = (cause_in(launcher_error) or (None,))[0]
        cause = cause if cause is Cause.NO_LOCKS else Cause.LAUNCHER_FAILED
        failure = Failure(cause, launcher_error, who=Plan.read(run.plan).started_by.program)
        return End.of(1, failure, f"; logs: {run.logs}")
    if first is not None and on_request and not _silent_suspects(run, records, stopped_by):
        return _stopped_without_a_step(run, first, stopped_by)
    # A requested stop explains the end better than the errors that it caused in the ranks.
    if stopped_by is not None and (status or first is not None):
        return _stopped(run, first, stopped_by)
    if first is not None and not first["secondary"] and not on_request:
        return _of_rank(first, shown)
    if first is None and status == 0:
        return End(0, f"done: {run}")
    return _without_cause(run, status, ended_by, oom_kills, records)


def _launcher_failure(run: RunDir) -> str:
    """Return the first line of torchrun's own exception.

    Empty if there is no exception, or if torchrun was ended by a signal.
    """
    with contextlib.suppress(OSError, DamagedFile):
        found = read_json(run.launcher_error).get("message")
        text = str(found.get("message") if isinstance(found, dict) else found)
        # torchrun wraps the original exception, the cause, in one of its own.
        inner = re.search(
            r"^[\w.]+(Error|Exception): .*", str(found).replace("\\n", "\n"), re.MULTILINE
        )
        return (
            ""
            if text.startswith("SignalException")
            else (inner[0] if inner else text.partition("\n")[0])[:300]
        )
    return ""


def _silent_suspects(run: RunDir, records: list[Json], stopped_by: int | None) -> set[int]:
    """Return the ranks without a record whose end may be the reason why the others were stopped.

    These are ranks whose supervisor was killed: the disk space that it reserved for an error record
    is still reserved. If no user requested a stop, they are also the ranks that never began.
    """
    began = ranks_that_began(run)
    recorded = {record["rank"] for record in records} | set(_exit_requests(run))
    killed = {rank for rank in began - recorded if run.spare(rank).exists()}
    requested = stopped_by is not None or run.stop_request.exists()
    return killed if requested else killed | set(range(Plan.read(run.plan).world_size)) - began


def _saved(run: RunDir, stopped_by: int | None, launcher_killed: bool = False) -> End:
    """Return the end of a run that saved after a stop request."""
    how = read_json(run.stopped)
    program = Plan.read(run.plan).started_by.program if launcher_killed else None
    killed = Failure(Cause.LAUNCHER_KILLED, who=program, signal=signal.SIGKILL) if program else None
    done = f"{sentence(killed)}; " if killed else ""
    done += f"stopped by {how['by']}, saved after step {how['step']} of {how['steps']}"
    status = 130 if stopped_by == signal.SIGINT else how["exit_status"]
    return End(status, done, Failure(Cause.STOPPED, done), stopped=True)


def explain_silence(run: RunDir, command: str) -> End:
    """Return the end of a run whose command disappeared together with its ranks."""
    if run.stopped.exists():
        return _saved(run, None)
    first = _first(_records(run))
    if first is not None and not first["secondary"]:
        return _of_rank(first)
    return End.of(137, Failure(Cause.COMMAND_KILLED, who=command), f"\nlogs: {run.logs}")


def _without_cause(
    run: RunDir, status: int, ended_by: int | None, oom_kills: int | None, records: list[Json]
) -> End:
    """Return the end of a run in which no rank recorded a failure of its own."""
    plan = Plan.read(run.plan)
    exit_requests = _exit_requests(run)
    # EXIT_SAVED requests another start. Without stopped.json nothing proves that the run saved.
    status = 1 if status == EXIT_SAVED else status
    if ended_by is not None and plan.started_by.program:
        killed = Failure(
            Cause.LAUNCHER_KILLED,
            who=plan.started_by.program,
            signal=ended_by,
            memory_kills=oom_kills,
        )
        return End.of(128 + ended_by, killed)
    began = ranks_that_began(run)
    silent = sorted(began - {record["rank"] for record in records} - set(exit_requests))
    # Ranks that ended in order removed the space reserved for their error record.
    lost = [rank for rank in silent if run.spare(rank).exists()] or silent
    if status and not records and is_full(run.path):
        return End.of(status, Failure(Cause.DISK_FULL, str(run)))
    if lost and status:
        return _lost(run, plan, lost, oom_kills)
    absent = sorted(set(range(plan.world_size)) - began)
    if absent and status:
        return _never_began(run, status, oom_kills, _names(plan, absent), len(began))
    first = _first(records)
    if (
        first is not None
        and first["cause"] is Cause.OUTLIVED
        and first["exit_status"] == EXIT_SAVED
    ):
        return _stopped(run, first, first["signal"])
    if exit_requests:
        rank = min(exit_requests, key=lambda rank: exit_requests[rank][1])
        number = exit_requests[rank][0]
        launcher = plan.started_by.program
        failure = Failure(Cause.SIGNALLED, launcher, who=_names(plan, [rank]), signal=number)
        return End.of(128 + number, failure, f"; logs: {run.logs}")
    if first is None:
        return _never_began(run, status, oom_kills)
    return _of_rank(first)._replace(failure=Failure(Cause.LOST_PEERS, first["summary"]))


def _never_began(
    run: RunDir, status: int, oom_kills: int | None, absent: str = "", began: int = 0
) -> End:
    """Return the end of a run in which ranks are absent, or the launcher failed without a cause."""
    failure = Failure(
        Cause.NEVER_BEGAN, who=absent, began=began, status=status, memory_kills=oom_kills
    )
    return End.of(status, failure, f"; see above, and {run.logs}")


def first_failure(run: RunDir) -> Json | None:
    """Return the record of the earliest original failure, else of a secondary one."""
    return _first(_records(run))


def _records(run: RunDir) -> list[Json]:
    """Return the error records of ranks, of a run that made no progress, and of a lost host."""
    return [account(path) for path in run.error_records]


def _first(records: list[Json]) -> Json | None:
    """Return the record of the failure that most likely caused the others; None without records."""
    return min(records, key=failure_order, default=None)


def failure_order(record: Json) -> tuple[bool, bool, int, float]:
    """Return the sort key of an error record: the most likely cause first.

    Original failures come before secondary ones. Of the latter, ranks come first that were killed
    because they had not saved in the grace period (OUTLIVED).
    """
    # Hosts' clocks differ, so the count of earlier records comes before the time.
    return (
        record["secondary"],
        record["cause"] is not Cause.OUTLIVED,
        record.get("after", 0),
        record["time"],
    )


def ranks_that_began(run: RunDir) -> set[int]:
    """Return the ranks whose supervisor started."""
    # Older logs belong to an earlier run in this folder.
    sent = run.request.stat().st_mtime_ns
    logs = [path for path in run.logs.glob("rank_*.err") if path.stat().st_mtime_ns >= sent]
    return {int(path.stem[len("rank_") :]) for path in logs}


def _exit_requests(run: RunDir) -> dict[int, tuple[int, float]]:
    """Return (signal, time of arrival) for each rank that received a signal to end."""
    found = {}
    for path in run.errors.glob("asked_*"):
        words = read_regular(path).decode(errors="replace").split()
        # The rank may have been killed while it wrote the file.
        if len(words) == 2 and words[0].isdecimal():
            found[int(path.name[len("asked_") :])] = (int(words[0]), float(words[1]))
    return found


def _stopped(run: RunDir, first: Json | None, number: int) -> End:
    """Return the end of a run that was requested to stop and did not save.

    The exit status is EXIT_SAVED if the run can continue from an older checkpoint.
    """
    too_slow = first is None or first["cause"] is Cause.OUTLIVED
    before = f"{_of_rank(first).text}\n" if first and (too_slow or not first["secondary"]) else ""
    text = f"stopped by {signal.Signals(number).name}"
    saved = run.complete_checkpoints()
    can_continue = (
        too_slow
        and number != signal.SIGINT
        and not run.cancelled.exists()
        and Plan.read(run.plan).traits.saves
    )
    if saved:
        lost = (
            " before it had saved; the steps after its newest checkpoint are lost"
            if can_continue
            else ""
        )
        text += f"{lost}; the newest checkpoint is after step {saved[-1][0]}"
    status = EXIT_SAVED if saved and can_continue else 128 + number
    return End(
        status, text, Failure(Cause.STOPPED, text, signal=number), before, stopped=bool(saved)
    )


def _stopped_without_a_step(run: RunDir, first: Json, stopped_by: int | None) -> End:
    """Return the end of a run that was requested to stop when it had nothing to save.

    It names the sender of the request rather than the signal that the ranks received.
    """
    status = first["exit_status"]
    by = None
    if stopped_by is not None:
        status = 130 if stopped_by == signal.SIGINT else status
        by = signal.Signals(stopped_by).name
    elif run.stop_request.exists():
        by = read_json(run.stop_request).get("by")
    if by is None:
        return _of_rank(first)._replace(status=status)
    saved = run.complete_checkpoints()
    newest = f"; the newest checkpoint is after step {saved[-1][0]}" if saved else ""
    text = f"stopped by {by} before its first or after its last step: nothing to save{newest}"
    return End(status, text, Failure(Cause.STOPPED, text), stopped=True)


def _lost(run: RunDir, plan: Plan, ranks: list[int], oom_kills: int | None) -> End:
    """Return the end for ranks that began and left no record: their supervisor was killed."""
    here = all(plan.node_of(rank).is_here for rank in ranks)
    # The kernel counts the processes of this host only.
    kills = oom_kills if here else None
    failure = Failure(Cause.RANK_VANISHED, who=_names(plan, ranks), memory_kills=kills)
    return End.of(137, failure, f"{_last_line(run, ranks)}\nlogs: {run.logs}")


def _last_line(run: RunDir, ranks: list[int]) -> str:
    """Return the last line of the first non-empty error log of these ranks."""
    # It may name the cause: MPI writes its reason there before it aborts.
    for rank in ranks:
        path = run.log(rank, "err")
        lines = read_regular(path).decode(errors="replace").split("\n") if path.exists() else []
        last = next((line.strip() for line in reversed(lines) if line.strip("\0 ")), None)
        if last is not None:
            return f"\nlast line of {path.name}: {last[:300]}"
    return ""


def _names(plan: Plan, ranks: list[int]) -> str:
    names = [f"rank {rank} on host {plan.node_of(rank).host}" for rank in ranks[:8]]
    return ", ".join([*names, *([f"{len(ranks) - 8} more"] if len(ranks) > 8 else [])])


def _of_rank(first: Json, shown: bool = False) -> End:
    """Return the end that a rank's record describes.

    Args:
        shown: whether rank 0's output went to the terminal.
    """
    was_shown = shown and first["rank"] == 0 and first["type"] in ("Signal", "Exit")
    traceback = _LIKE_OURS.sub("  ", (first.get("folded") or first["traceback"]).rstrip())
    before = f"{traceback}\n\n" if traceback and not was_shown else ""
    return End(first["exit_status"], first["summary"], Failure.of_record(first), before)
