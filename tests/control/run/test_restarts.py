"""Tests of `launch.max_restarts`: failures that lead to a restart, waits, and kept records."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from ortlaunch.base.cause import Cause
from ortlaunch.launch import restarts
from ortlaunch.launch.attempts import move_logs_to_new_attempt_and_return_number_or_0
from ortlaunch.launch.record import Attempt, JobRecord
from ortlaunch.launch.restart_policy import (
    reason_restart_is_refused,
    restart_delay_seconds,
    restarts_without_progress,
)
from ortlaunch.launch.restarts import (
    EndedAttempt,
    start_ranks_and_restart_after_faults_or_on_request,
)
from ortlaunch.planning.describe import plan_description_text
from ortlaunch.resolve.prepare import write_run_files_and_clear_earlier_start
from ortlaunch.run.job_file import JobFile
from ortlaunch.run_folder.folder import RunDir, write_json_atomically, write_text_atomically
from ortlaunch.run_folder.verdict import Verdict
from ortlaunch.started_runs.status import read_status
from tests.makers import host, plan, recipe

# An attempt that failed after step 7, whose newest checkpoint is after step 4.
FIRST = Attempt(1, 9.0, 1, Cause.RAISED, "rank 1 failed", "ValueError: planted", 7, 4, 0)


def test_the_same_failure_at_the_same_step_is_deterministic() -> None:
    """The same failure at the same step is not tried again, also with other numbers in its text."""
    again = replace(FIRST, number=2, resumed=4)
    said = reason_restart_is_refused([FIRST, again], 9)
    assert said == (
        "not restarted: the same failure after step 7 as before (ValueError: planted), so it "
        "is deterministic"
    )
    # Process ids and seconds differ from start to start.
    pids = [replace(again, failure=f"Stall: process {pid} for {pid}.5 s") for pid in (7, 42)]
    assert "deterministic" in (reason_restart_is_refused(pids, 9) or "")
    assert reason_restart_is_refused([FIRST, replace(again, step=8)], 9) is None
    assert reason_restart_is_refused([FIRST, replace(again, failure="KeyError: 1")], 9) is None
    assert reason_restart_is_refused([FIRST, replace(again, exit_status=3)], 9) is None


def test_a_kill_from_outside_may_meet_the_same_step() -> None:
    """A SIGKILL or a lost host may repeat at the same step, a lack of memory may not."""
    # Only the kernel's out-of-memory killer has a cause within the run.
    killed = replace(FIRST, exit_status=137, failure="exit status 137")
    assert reason_restart_is_refused([killed, killed], 9) is None
    lost = replace(
        FIRST, cause=Cause.HOST_LOST, failure="LostHost: ssh to b ended with status 255", step=None
    )
    assert reason_restart_is_refused([lost, lost], 9) is None
    memory = replace(killed, cause=Cause.OUT_OF_MEMORY)
    assert "deterministic" in (reason_restart_is_refused([memory, memory], 9) or "")


def test_a_failure_before_any_rank_began_that_repeats() -> None:
    """A failure before any rank began is tried again once."""
    # The first time it may be an accident.
    early = replace(FIRST, step=None, failure="exit status 250", exit_status=250)
    assert reason_restart_is_refused([early], 1) is None
    assert "the same failure before any rank started" in (
        reason_restart_is_refused([early, early], 9) or ""
    )


def test_progress_begins_the_count_anew() -> None:
    """A new checkpoint or a hundred steps reset the count of restarts; the waits have a limit."""
    failed = [replace(FIRST, step=7 + n, checkpoint=4) for n in range(4)]
    assert restarts_without_progress(failed) == 3
    assert reason_restart_is_refused(failed[:3], 3) is None
    assert (
        reason_restart_is_refused(failed, 3)
        == "not started again: 3 restarts without progress (launch.max_restarts: 3)"
    )
    assert restarts_without_progress([*failed, replace(FIRST, checkpoint=8)]) == 0
    # Many more steps are progress, also without a new checkpoint.
    assert restarts_without_progress([*failed, replace(FIRST, step=200)]) == 0
    assert [restart_delay_seconds(failed[:n]) for n in (1, 2, 3)] == [1.0, 2.0, 4.0]
    assert restart_delay_seconds(failed[:1] * 50) == 60.0


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """The folder of a run of two ranks, without waits between the starts."""
    monkeypatch.setattr(restarts.time, "sleep", lambda _: None)
    run = RunDir(tmp_path / "run")
    write_text_atomically(run.plan, plan(recipe(), [host("localhost", 2)], "mpi").to_json())
    write_text_atomically(run.request, "")
    return run


def fail(run: RunDir, step: int) -> EndedAttempt:
    """Write the files of a start in which rank 1 fails, and return its end."""
    for rank in (0, 1):
        write_text_atomically(run.rank_log_path(rank, "err"), f"at {step}")
    record = {
        "rank": 1,
        "exit_status": 7,
        "type": "ValueError",
        "message": f"step {step}",
        "step": step,
    }
    write_json_atomically(
        run.rank_error_path(1),
        {**record, "secondary": False, "time": 1.0, "traceback": "", "summary": "rank 1 failed"},
    )
    return EndedAttempt(Verdict(7, f"rank 1 failed at {step}", traceback="Traceback"), False)


def test_each_attempt_is_kept_and_told(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    """Each attempt's files are kept in attempts/N, its cause in job.json and in `status`."""
    ends = iter(
        [
            lambda: fail(run, 5),
            lambda: fail(run, 6),
            lambda: EndedAttempt(Verdict(0, "done: run"), False),
        ]
    )
    with JobFile(run, "mpi") as file:
        ended = start_ranks_and_restart_after_faults_or_on_request(
            run, 3, file.record_attempts_and_stop_collecting_signals, lambda _: next(ends)()
        )
        file.record_start_of_ranks()
        assert re.search(
            r"attempt 1 failed after step 5, in 0:\d\d: rank 1 failed at 5", str(read_status(run))
        )
        assert str(read_status(run)).splitlines()[-1] == "attempt 3 runs"
        file.record_end_or_print_disk_error(Verdict(0, ""))
    # A run that ends well after restarts notes them.
    assert re.fullmatch(
        r"done: run, after 2 restarts \(failed attempts took 0:\d\d\)", ended.verdict.render()
    )
    assert (run.attempt_folder(1) / "logs" / "rank_00001.err").read_text() == "at 5"
    assert (run.attempt_folder(2) / "errors" / "rank_00001.json").exists()
    assert not run.errors.exists()
    record = JobRecord.read_or_none_refusing_damaged(run)
    assert record is not None
    assert [(one.step, one.exit_status, one.folder) for one in record.attempts] == [
        (5, 7, "attempts/1"),
        (6, 7, "attempts/2"),
    ]
    said = capsys.readouterr().err
    assert (
        "attempt 1 failed; restarting the ranks in 1 s, at step 1, because no checkpoint is complete"
        in said
    )
    assert "(restart 2 of 3 without progress)" in said


def test_a_jobs_own_output_stays(run: RunDir) -> None:
    """The output of a Slurm job is not moved with the logs of a failed start."""
    # Slurm continues to write to it, and `ortlaunch logs` reads it there.
    fail(run, 5)
    write_text_atomically(run.logs / "slurm-12.out", "hello")
    assert move_logs_to_new_attempt_and_return_number_or_0(run) == 1
    assert [path.name for path in run.logs.iterdir()] == ["slurm-12.out"]
    assert (run.attempt_folder(1) / "logs" / "rank_00001.err").exists()


def test_a_request_that_came_meanwhile_is_for_the_next_start(run: RunDir) -> None:
    """A stop that is requested between two starts counts for the second one."""
    # A new command begins without the requests of an earlier one.
    made = recipe()
    for again in (True, False):
        write_text_atomically(run.stop_request, "{}")
        write_run_files_and_clear_earlier_start(run, made, plan(made), is_restart=again)
        assert run.stop_request.exists() is again


def test_a_start_that_left_nothing_has_no_folder(run: RunDir) -> None:
    """A start in which no rank began has no folder of its own."""
    # Only its launcher failed.
    ends = iter([Verdict(250, "no rank began"), Verdict(0, "done")])
    with JobFile(run, "mpi") as file:
        start_ranks_and_restart_after_faults_or_on_request(
            run,
            3,
            file.record_attempts_and_stop_collecting_signals,
            lambda _: EndedAttempt(next(ends), False),
        )
        assert [one.folder for one in file.record.attempts] == [None]


def test_a_deterministic_failure_stops_the_second_time(run: RunDir) -> None:
    """A deterministic failure ends the run with its own status, and its logs stay in place."""
    ended = start_ranks_and_restart_after_faults_or_on_request(
        run,
        3,
        JobFile(run, "mpi").record_attempts_and_stop_collecting_signals,
        lambda attempt: fail(run, 7),
    )
    assert ended.verdict.exit_status == 7
    assert (
        ended.verdict.render()
        .splitlines()[-1]
        .startswith("ortlaunch: not restarted: the same failure after step 7")
    )
    assert run.rank_error_path(1).exists()
    assert not run.attempt_folder(2).exists()


@pytest.mark.parametrize(
    ("status", "stopped"), [(2, False), (85, False), (130, False), (143, False), (1, True)]
)
def test_what_is_no_fault(status: int, stopped: bool, run: RunDir) -> None:
    """Input errors and requested stops start nothing again."""
    # 2: input error; 85: saved; 130 and 143: SIGINT and SIGTERM; the last: a signal to the command.
    starts: list[int] = []

    def start(attempt: int) -> EndedAttempt:
        starts.append(attempt)
        return EndedAttempt(Verdict(status, "said"), stopped)

    assert start_ranks_and_restart_after_faults_or_on_request(
        run, 3, JobFile(run, "mpi").record_attempts_and_stop_collecting_signals, start
    ).verdict == Verdict(status, "said")
    assert starts == [1]


def test_the_plan_says_what_follows_a_fault() -> None:
    """The plan notes restarts, and that none happens under the user's own launcher."""
    made = recipe(launch={"max_restarts": 3})
    assert (
        "restarted from the last complete checkpoint, at most 3 times without"
        in plan_description_text(plan(made), made)
    )
    assert "launch.max_restarts: the launcher is not ortlaunch's" in plan_description_text(
        plan(made, launcher="inside"), made
    )
    assert "restart" not in plan_description_text(plan(recipe()), recipe())
