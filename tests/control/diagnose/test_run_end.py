"""Tests of a run's end by its folder: the first failing rank, its status and its output."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.diagnose import run_end
from ortlaunch.diagnose.run_end import verdict_on_end_of_launcher
from ortlaunch.launch.attempts import move_logs_to_new_attempt_and_return_number_or_0
from ortlaunch.recipe import dump_recipe_yaml
from ortlaunch.run_folder.folder import RunDir, write_json_atomically, write_text_atomically
from ortlaunch.run_folder.verdict import Verdict
from ortlaunch.worker.supervision.run_folder_watcher import RunFolderWatcher
from tests.makers import host, plan, recipe

TRACEBACK = "Traceback (most recent call last):\n  ...\nValueError: planted\n"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """The folder of a run of 2 + 2 ranks on hosts a and b, in which every rank has begun."""
    run = RunDir(tmp_path / "run")
    write_text_atomically(run.plan, plan(recipe(), [host("a", 2), host("b", 2)], "mpi").to_json())
    write_text_atomically(run.request, "")
    for rank in range(4):
        write_text_atomically(run.rank_log_path(rank, "err"), "")
    return run


def ended(run: RunDir, rank: int, time: float = 1.0, **fields: Any) -> None:
    """Write the record of a failed rank, with the fields that are read here."""
    how = {
        "exit_status": 1,
        "traceback": TRACEBACK,
        "summary": f"rank {rank} failed",
        "secondary": False,
    }
    write_json_atomically(run.rank_error_path(rank), {"rank": rank, **how, "time": time, **fields})


def shown(end: Verdict) -> tuple[int, str]:
    """Return the exit status and the printed text."""
    return end.exit_status, end.render()


def echo(run: RunDir, rank: int, time: float) -> None:
    """Write the record of a rank that lost its peer."""
    ended(run, rank, time, traceback="RuntimeError: Connection closed by peer", secondary=True)


def test_a_good_end(run: RunDir) -> None:
    """Status 0 without an error prints the run folder alone."""
    assert shown(verdict_on_end_of_launcher(run, 0)) == (0, f"done: {run}")


@pytest.mark.parametrize("wanted", [False, True])
def test_torchruns_own_exception_is_no_stop(wanted: bool, run: RunDir) -> None:
    """torchrun's own exception is the cause of the end, unless a stop was requested."""
    # Its ranks stop by the SIGTERM that it sends them, which looks like a requested stop.
    ended(
        run,
        2,
        cause="stopped",
        exit_status=85,
        traceback="",
        summary="rank 2 was stopped by SIGTERM",
    )
    write_json_atomically(
        run.launcher_error, {"message": {"message": "UnpicklingError: invalid load key\nmore"}}
    )
    if wanted:
        write_json_atomically(run.stop_request, {"by": "a person"})
    end = verdict_on_end_of_launcher(run, 1)
    assert end.exit_status == (85 if wanted else 1)
    assert (
        "mpirun failed with UnpicklingError: invalid load key, and the other ranks were stopped"
        in end.render()
    ) is not wanted
    # The cause is in the call stack, above torchrun's own exception.
    stack = (
        "Traceback:\n  a\ntorch.DistStoreError: No locks available\n\n"
        "The above:\nRendezvousError: See inner"
    )
    info = {"message": "RendezvousError: See inner", "extraInfo": {"py_callstack": stack}}
    write_json_atomically(run.launcher_error, {"message": info})
    assert (
        "failed with torch.DistStoreError: No locks available, and"
        in verdict_on_end_of_launcher(run, 1).render()
    ) is not wanted
    # An exception for a signal means that torchrun itself was stopped.
    write_json_atomically(
        run.launcher_error, {"message": {"message": "SignalException: Process 1 got signal: 15"}}
    )
    assert verdict_on_end_of_launcher(run, 1).exit_status == 85
    write_json_atomically(run.launcher_error, {"message": {"message": ""}})
    assert verdict_on_end_of_launcher(run, 1).exit_status == 85


def test_85_without_a_record_is_no_stop(run: RunDir) -> None:
    """Status 85 of a launcher without a record of a stop does not count as saved."""
    assert verdict_on_end_of_launcher(run, 85).exit_status != 85


def test_the_first_failure_is_the_cause(run: RunDir) -> None:
    """The earliest of several failures is the cause, with its traceback before the last line."""
    ended(run, 1, time=5.0, traceback="KeyError: later", exit_status=3)
    ended(run, 2, time=4.0)
    assert shown(verdict_on_end_of_launcher(run, 1)) == (
        1,
        f"{TRACEBACK.rstrip()}\n\nortlaunch: rank 2 failed",
    )


def test_clocks_do_not_say_who_was_first(run: RunDir) -> None:
    """The order of records counts more than the hosts' clocks."""
    # The clock of rank 0's host is behind: it stopped after it could read why rank 2 failed.
    # `after` has the records that existed before.
    ended(run, 2, time=50.0, after=0)
    stopped = {"cause": "stopped", "exit_status": 85, "traceback": ""}
    ended(run, 0, time=4.0, after=1, **stopped)
    assert verdict_on_end_of_launcher(run, 1).exit_status == 1


def test_lines_of_an_exception_do_not_pass_for_ours(run: RunDir) -> None:
    """A line of a user's exception that looks like the command's output is indented."""
    ended(run, 1, traceback="ValueError: no\nortlaunch: done: all is well\n")
    said = "ValueError: no\n  ortlaunch: done: all is well\n\nortlaunch: rank 1 failed"
    assert verdict_on_end_of_launcher(run, 1).render() == said


def test_an_echo_is_not_the_cause(run: RunDir) -> None:
    """A rank that lost its peer is not the cause, even if it wrote its record first."""
    echo(run, 0, time=1.0)
    ended(run, 3, time=2.0, exit_status=7)
    assert shown(verdict_on_end_of_launcher(run, 1)) == (
        7,
        f"{TRACEBACK.rstrip()}\n\nortlaunch: rank 3 failed",
    )


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_rank(number: int, run: RunDir) -> None:
    """A killed rank without a traceback is reported in one line, with its own status."""
    echo(run, 0, time=1.0)
    ended(run, 1, 2.0, traceback="", exit_status=128 + number)
    assert shown(verdict_on_end_of_launcher(run, 1)) == (128 + number, "ortlaunch: rank 1 failed")


LOST = (
    "ortlaunch: {} disappeared without an error record (usually SIGKILL, often out of memory: "
    "see dmesg there)\nlogs: {}"
)


@pytest.mark.parametrize(
    ("silent", "names"),
    [
        ([2], "rank 2 on host b"),
        ([0, 1], "rank 0 on host a, rank 1 on host a"),
        ([0, 1, 2, 3], "rank 0 on host a, rank 1 on host a, rank 2 on host b, rank 3 on host b"),
    ],
)
def test_a_rank_whose_supervisor_was_killed(silent: list[int], names: str, run: RunDir) -> None:
    """Ranks that began and left no record are the cause, if the others only lost their peers."""
    for rank in {0, 1, 2, 3} - set(silent):
        echo(run, rank, time=1.0)
    assert shown(verdict_on_end_of_launcher(run, 1)) == (137, LOST.format(names, run.logs))


def test_the_last_line_of_a_rank_that_vanished(run: RunDir) -> None:
    """The last line of a vanished rank's log is printed."""
    # MPI writes the reason of an abort there, and ends the supervisor as well.
    for rank in (0, 1, 2):
        echo(run, rank, time=1.0)
    run.rank_log_path(3, "err").write_text(
        "Abort(1) on node 3\nucx function failed (Shared memory error)\n\n"
    )
    said = verdict_on_end_of_launcher(run, 1).render().splitlines()
    assert said[1] == "last line of rank_00003.err: ucx function failed (Shared memory error)"


@pytest.mark.parametrize(
    ("kills", "name", "hint"),
    [
        # Without a count, the kernel's log may give the reason.
        (None, "localhost", ": see dmesg there"),
        (0, "localhost", ""),
        (0, socket.gethostname(), ""),
        (0, f"me@{socket.gethostname()}", ""),
        (
            2,
            "localhost",
            "; the kernel's out-of-memory killer ended 2 of this control group's processes meanwhile",
        ),
        # The count of this host's kernel has nothing on host b.
        (0, "b", ": see dmesg there"),
    ],
)
def test_memory_is_named_where_the_kernel_counts_it(
    kills: int | None, name: str, hint: str, run: RunDir
) -> None:
    """The kernel's count of out-of-memory kills is printed, for ranks of this host only."""
    write_text_atomically(run.plan, plan(recipe(), [host(name, 4)], "mpi").to_json())
    for rank in range(3):
        echo(run, rank, time=1.0)
    lost = (
        f"rank 3 on host {name} disappeared without an error record (usually SIGKILL, often out "
        "of memory"
    )
    assert shown(verdict_on_end_of_launcher(run, 1, oom_kills=kills)) == (
        137,
        f"ortlaunch: {lost}{hint})\nlogs: {run.logs}",
    )


@pytest.mark.parametrize(("launcher", "program"), [("torchrun", "torchrun"), ("mpi", "mpirun")])
def test_a_killed_launcher_is_named(launcher: str, program: str, run: RunDir) -> None:
    """A launcher that was killed first is the cause, not the ranks that ended with it."""
    write_text_atomically(
        run.plan, json.dumps({**json.loads(run.plan.read_text()), "launcher": launcher})
    )
    echo(run, 0, time=1.0)
    said = (
        f"ortlaunch: {program} was stopped by SIGKILL, and the ranks with it; no rank had "
        "failed before"
    )
    assert shown(verdict_on_end_of_launcher(run, 137, launcher_signal=signal.SIGKILL)) == (
        137,
        said,
    )
    memory = (
        "; the kernel's out-of-memory killer ended 1 of this control group's processes meanwhile"
    )
    assert shown(
        verdict_on_end_of_launcher(run, 137, launcher_signal=signal.SIGKILL, oom_kills=1)
    ) == (
        137,
        said + memory,
    )
    # A rank's own failure remains the cause.
    ended(run, 3, time=2.0, exit_status=7)
    assert verdict_on_end_of_launcher(run, 137, launcher_signal=signal.SIGKILL).exit_status == 7


def test_ranks_that_were_asked_to_end(run: RunDir) -> None:
    """The rank that was first requested to end by a signal is named."""
    # mpirun that receives SIGTERM leaves a rank no time to record its end.
    for rank, when in enumerate((5.0, 4.0, 6.0, 7.0)):
        write_text_atomically(run.signal_mark_path(rank), f"15 {when}")
    said = "rank 1 on host a was ended by SIGTERM, sent to it or to mpirun from outside this run"
    assert shown(verdict_on_end_of_launcher(run, 137)) == (
        143,
        f"ortlaunch: {said}; no rank had failed before; logs: {run.logs}",
    )
    # Empty: the supervisor was killed while it wrote.
    run.signal_mark_path(3).write_text("")
    assert (
        verdict_on_end_of_launcher(run, 137)
        .render()
        .startswith("ortlaunch: rank 3 on host b disappeared")
    )


def test_a_rank_that_never_began(run: RunDir) -> None:
    """A rank whose supervisor was killed before it opened its logs is named as the cause."""
    run.rank_log_path(2, "err").unlink()
    for rank in (0, 1, 3):
        write_text_atomically(run.signal_mark_path(rank), "15 1.0")
        echo(run, rank, time=1.0)
    said = (
        "rank 2 on host b ended before it started, and the launcher ended with status 1; see "
        f"above, and {run.logs}"
    )
    assert shown(verdict_on_end_of_launcher(run, 1)) == (1, f"ortlaunch: {said}")


def test_a_rank_that_came_to_its_end_has_not_vanished(run: RunDir) -> None:
    """Only a rank whose reserved disk space is left has vanished."""
    # A supervisor that ends in order deletes the space for its record; a killed one does not.
    echo(run, 0, time=1.0)
    echo(run, 1, time=1.0)
    write_text_atomically(run.reserved_space_path(3), "")
    assert shown(verdict_on_end_of_launcher(run, 1)) == (
        137,
        LOST.format("rank 3 on host b", run.logs),
    )


def test_a_disk_on_which_nobody_could_write(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk, ranks without a record have not vanished, and memory is not blamed."""
    monkeypatch.setattr(run_end, "is_disk_nearly_full", lambda path: path == run.path)
    said = f"ortlaunch: no space left on device ({run}), so no rank could write its error record"
    assert shown(verdict_on_end_of_launcher(run, 1)) == (1, said)
    ended(run, 3, time=2.0, exit_status=7)
    assert verdict_on_end_of_launcher(run, 1).exit_status == 7


def test_a_silent_rank_is_not_the_cause_beside_a_real_one(run: RunDir) -> None:
    """Ranks that ended without a record after the first failure are not the cause."""
    ended(run, 1)
    assert verdict_on_end_of_launcher(run, 1).exit_status == 1


def test_no_rank_began(run: RunDir) -> None:
    """A launcher that fails before any rank begins keeps its status; the logs are named."""
    # A rank has begun if its log exists.
    for log in run.logs.iterdir():
        log.unlink()
    ranks = "rank 0 on host a, rank 1 on host a, rank 2 on host b, rank 3 on host b"
    said = (
        f"no rank started ({ranks}), and the launcher ended with status 213; see above, and "
        f"{run.logs}"
    )
    assert shown(verdict_on_end_of_launcher(run, 213)) == (213, f"ortlaunch: {said}")


def test_logs_of_an_earlier_run_are_not_this_ones(run: RunDir) -> None:
    """Logs of an earlier run in the same folder are no sign that a rank began in this one."""
    for log in run.logs.iterdir():
        os.utime(log, (1, 1))
    assert verdict_on_end_of_launcher(run, 213).exit_status == 213
    os.utime(run.rank_log_path(3, "err"))
    assert shown(verdict_on_end_of_launcher(run, 213)) == (
        137,
        LOST.format("rank 3 on host b", run.logs),
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("status", [0, 1, 143])
def test_stopped_by_the_user(number: int, status: int, run: RunDir) -> None:
    """A signal of the user determines status and text; those of launcher and ranks do not count."""
    ended(run, 0, exit_status=143, secondary=True)
    end = verdict_on_end_of_launcher(run, status, user_signal=number)
    assert shown(end) == (128 + number, f"ortlaunch: stopped by {signal.Signals(number).name}")


def test_stopped_with_a_checkpoint(run: RunDir) -> None:
    """The step of the newest checkpoint is printed after a stop."""
    write_text_atomically(run.checkpoint_folder(20) / "COMPLETE", "")
    expected = "ortlaunch: stopped by SIGINT; the newest checkpoint is after step 20"
    assert shown(verdict_on_end_of_launcher(run, 1, user_signal=signal.SIGINT)) == (130, expected)


def test_a_stop_that_was_not_saved_in_time(run: RunDir) -> None:
    """A stop that was not saved in time continues from an older checkpoint, unless cancelled."""
    late = {"cause": "outlived", "secondary": True, "signal": 15, "traceback": ""}
    ended(run, 0, exit_status=143, **late)
    assert verdict_on_end_of_launcher(run, 1, user_signal=signal.SIGTERM).exit_status == 143
    write_text_atomically(run.checkpoint_folder(20) / "COMPLETE", "")
    ended(run, 0, exit_status=85, **late)
    said = "stopped by SIGTERM before it had saved; the steps after its newest checkpoint are lost"
    text = f"ortlaunch: rank 0 failed\nortlaunch: {said}; the newest checkpoint is after step 20"
    expected = (85, text)
    assert shown(verdict_on_end_of_launcher(run, 1, user_signal=signal.SIGTERM)) == expected
    # The same without the command's signal: the ranks themselves were requested to end.
    for rank in (1, 2, 3):
        write_text_atomically(run.signal_mark_path(rank), "15 1.0")
    assert shown(verdict_on_end_of_launcher(run, 1)) == expected
    write_text_atomically(run.cancelled, "")
    assert verdict_on_end_of_launcher(run, 1, user_signal=signal.SIGTERM).exit_status == 143


def test_a_stop_after_the_last_step_loses_nothing(run: RunDir) -> None:
    """A run that is stopped with the checkpoint of its last step has lost no step."""
    write_text_atomically(run.checkpoint_folder(20) / "COMPLETE", "")
    write_text_atomically(run.recipe, dump_recipe_yaml(recipe(train={"max_steps": 20})))
    said = "stopped by SIGUSR1 after its last step; the newest checkpoint is after step 20"
    assert shown(verdict_on_end_of_launcher(run, 1, user_signal=signal.SIGUSR1)) == (
        85,
        f"ortlaunch: {said}",
    )


def test_a_signal_after_the_end_changes_nothing(run: RunDir) -> None:
    """A signal after the end of all ranks changes nothing."""
    assert shown(verdict_on_end_of_launcher(run, 0, user_signal=signal.SIGTERM)) == (
        0,
        f"done: {run}",
    )


def test_stopped_after_a_failure(run: RunDir) -> None:
    """A failure before the user's signal is printed as well."""
    ended(run, 1)
    expected = f"{TRACEBACK.rstrip()}\n\nortlaunch: rank 1 failed\nortlaunch: stopped by SIGINT"
    assert shown(verdict_on_end_of_launcher(run, 1, user_signal=signal.SIGINT)) == (130, expected)


@pytest.mark.parametrize(
    ("number", "by", "status", "who"),
    [
        (signal.SIGINT, "SIGINT", 130, "SIGINT"),
        (signal.SIGTERM, None, 85, "SIGTERM"),
        (None, "`ortlaunch stop` of me on host a", 85, "`ortlaunch stop` of me on host a"),
    ],
)
def test_a_stop_before_the_first_step_names_who_asked(
    number: int | None, by: str | None, status: int, who: str, run: RunDir
) -> None:
    """A stop before the first step names the sender, and can be continued."""
    # Neither the signal that the command forwards to the ranks nor their status is the sender's.
    stopped = {"cause": "stopped", "exit_status": 85, "traceback": ""}
    for rank in range(4):
        ended(run, rank, summary="rank was stopped by SIGUSR1", **stopped)
    if by is not None:
        write_json_atomically(run.stop_request, {"by": by})
    end = verdict_on_end_of_launcher(run, 1, user_signal=number)
    said = f"ortlaunch: stopped by {who} before its first or after its last step: nothing to save"
    assert (*shown(end), end.can_continue) == (status, said, True)


@pytest.mark.parametrize("lost", ["spare", "began"])
def test_a_stop_that_no_person_asked_for_is_not_the_cause(lost: str, run: RunDir) -> None:
    """A stop that the launcher requested after it lost a rank is a fault, not status 85."""
    # The other ranks stop as requested, because no step is complete.
    for rank in (0, 1, 2):
        stopped = {"cause": "stopped", "exit_status": 85, "traceback": ""}
        ended(run, rank, **stopped)
    write_text_atomically(run.reserved_space_path(3), "") if lost == "spare" else run.rank_log_path(
        3, "err"
    ).unlink()
    end = verdict_on_end_of_launcher(run, 1)
    assert end.exit_status == (137 if lost == "spare" else 1)
    assert (
        "rank 3 on host b disappeared"
        if lost == "spare"
        else "rank 3 on host b ended before it started"
    ) in end.render()
    # A person's request explains why a rank never began.
    if lost == "began":
        write_text_atomically(run.stop_request, "{}")
        assert verdict_on_end_of_launcher(run, 1).exit_status == 85


def test_accounts_are_counted_without_a_listing(tmp_path: Path) -> None:
    """Records are counted in order, without equal clocks and without a list of the earlier ones."""
    # With 8,192 ranks a list of the earlier ones in each record would be too long.
    run = RunDir(tmp_path)
    run.errors.mkdir()
    assert [run.append_rank_and_return_earlier_error_count(rank) for rank in (4, -1, 12345)] == [
        0,
        1,
        2,
    ]
    assert run.accounts.stat().st_size == 24
    assert run.first_failed_ranks() == [4, -1, 12345]


def test_a_failure_of_another_rank_is_seen_without_a_listing(tmp_path: Path) -> None:
    """A rank detects a failure of another rank, not its own."""
    # On a full disk no record can be counted, so the files are listed.
    run = RunDir(tmp_path / "run")
    other = RunDir(tmp_path / "full")
    found = [RunFolderWatcher(run, 1).has_another_rank_recorded_end()]
    for rank in (1, 0):
        run.append_rank_and_return_earlier_error_count(rank)
        found.append(RunFolderWatcher(run, 1).has_another_rank_recorded_end())
    assert found == [False, False, True]
    write_text_atomically(other.accounts, "")
    write_text_atomically(other.rank_error_path(0), "")
    assert [RunFolderWatcher(other, rank).has_another_rank_recorded_end() for rank in (0, 1)] == [
        False,
        True,
    ]


def test_a_rank_that_comes_back_after_a_restart(run: RunDir) -> None:
    """A rank of an earlier start, on a host that was suspended, does not decide on this start."""
    late = RunDir(run.path, run.start_number)
    ended(late, 3, 1.0, traceback="")
    assert shown(verdict_on_end_of_launcher(run, 1)) == (1, "ortlaunch: rank 3 failed")
    # The command starts the ranks again: it writes the request anew, and moves the records away.
    move_logs_to_new_attempt_and_return_number_or_0(run)
    os.utime(run.request, ns=(1, run.start_number + 1))
    ended(late, 1, 2.0)
    late.append_rank_and_return_earlier_error_count(1)
    write_json_atomically(late.lost, {"rank": 0, "host": "a", "summary": "no heartbeat"})
    assert verdict_on_end_of_launcher(run, 0) == Verdict(0, f"done: {run}")
    assert run.first_failed_ranks() == []
    assert sorted(path.name for path in (run.attempts / "late/errors").iterdir()) == [
        "accounts", "lost.json", "rank_00001.json",
    ]  # fmt: skip
