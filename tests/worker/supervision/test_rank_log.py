"""A rank's output in logs and on the terminal, and the record of its end, also on a full disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ortlaunch.base.cause import Cause
from ortlaunch.run_folder.error_record import ErrorRecord, read_error_record_or_describe_damage
from ortlaunch.run_folder.folder import RunDir, write_text_atomically
from ortlaunch.worker.supervision import end_record
from tests.makers import host, plan, recipe
from tests.worker.guarded import guarded, write_plan


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """The folder of a run that ortlaunch's own launcher started."""
    run = RunDir(tmp_path / "run")
    write_plan(run, "mpi")
    return run


@pytest.mark.parametrize("rank", [0, 1])
def test_a_good_life(rank: int, run: RunDir) -> None:
    """Both streams are in the logs, rank 0's also on the terminal, and no error is recorded."""
    ended = guarded(run, "", rank)
    assert (ended.status, ended.record) == (0, None)
    assert (ended.out, ended.err) == (("to stdout\n", "to stderr\n") if rank == 0 else ("", ""))
    assert run.rank_log_path(rank, "out").read_text() == "to stdout\n"
    assert run.rank_log_path(rank, "err").read_text() == "to stderr\n"


def test_all_ranks_are_shown_where_that_is_asked_for(run: RunDir) -> None:
    """With `log.ranks: all`, each line has its host and rank in front; the logs are unchanged."""
    made = plan(recipe(log={"ranks": "all"}), [host("localhost", 2)], "torchrun")
    write_text_atomically(run.plan, made.to_json())
    ended = guarded(run, "print('more')")
    name = f"{os.uname().nodename} rank 1: "
    assert (ended.out, ended.err) == (f"{name}to stdout\n{name}more\n", f"{name}to stderr\n")
    assert run.rank_log_path(1, "out").read_text() == "to stdout\nmore\n"


def test_a_log_on_a_full_disk_ends_nothing(run: RunDir) -> None:
    """A rank whose log is on a full disk continues, and the gap is reported once."""
    run.logs.mkdir(parents=True)
    # A device whose writes fail with ENOSPC.
    run.rank_log_path(1, "out").symlink_to("/dev/full")
    ended = guarded(run, "print('more', flush=True); time.sleep(0.2); print('again', flush=True)")
    assert (ended.status, ended.record) == (0, None)
    assert (
        ended.err
        == f"ortlaunch: {run.rank_log_path(1, 'out')} is not complete: No space left on device\n"
    )


@pytest.mark.parametrize("life", ["raise ValueError('planted' * 10_000)", "os._exit(5)"])
def test_how_a_rank_ends_on_a_full_disk(life: str, run: RunDir) -> None:
    """On a full disk, a rank's record has its reserved space: status and cause are kept."""
    ended = guarded(run, life, FULL="1")
    assert ended.record is not None
    assert ended.status == ended.record["exit_status"] == (5 if "5" in life else 1)
    assert ended.record["summary"].startswith("rank 1 on host")
    assert {path.name for path in run.errors.iterdir()} == {
        run.rank_error_path(1).name,
        run.accounts.name,
    }


NO_SPACE = "raise OSError(28, 'No space left on device', '/data/x')"


@pytest.mark.parametrize(
    "life", [NO_SPACE, f"try:\n    {NO_SPACE}\nexcept OSError:\n    raise RuntimeError('pos')"]
)
def test_a_full_disk_is_the_cause(life: str, run: RunDir) -> None:
    """A failure for want of disk space names it, also where a library's own error hides it."""
    record = guarded(run, life).record
    assert record is not None
    assert ": no space left on device (/data/x); exit status 1" in record["summary"]


def test_the_traceback_is_recorded_and_logged(run: RunDir) -> None:
    """A failure has its traceback in the record and in the rank's log."""
    record = guarded(run, "raise ValueError('planted')").record
    assert record is not None
    assert record["traceback"].startswith("Traceback (most recent call last):")
    assert record["traceback"].rstrip().endswith("ValueError: planted")
    assert record["traceback"] in run.rank_log_path(1, "err").read_text()


def test_an_error_for_the_user_has_no_traceback(run: RunDir) -> None:
    """An error that is written for the user is recorded as a message only."""
    record = guarded(run, "raise EngineError('no such operator')").record
    assert record is not None
    assert record["traceback"] == "no such operator"


def test_last_words_of_a_killed_rank(run: RunDir) -> None:
    """A killed rank has the last 20 lines of its log in its record."""
    life = (
        "print('\\n'.join(f'line {i}' for i in range(100)), file=sys.stderr, flush=True); "
        "os.kill(os.getpid(), 9)"
    )
    record = guarded(run, life).record
    assert record is not None
    assert record["traceback"].splitlines() == [f"line {number}" for number in range(80, 100)]


def test_everything_said_is_logged(run: RunDir) -> None:
    """Output larger than a pipe, written just before the end, is complete in the log."""
    ended = guarded(run, "sys.stdout.write('x' * 300_000); sys.stdout.flush(); os._exit(5)")
    assert ended.status == 5
    assert run.rank_log_path(1, "out").read_text() == "to stdout\n" + "x" * 300_000 + "\n"


LIVE = "print('\\x1b]ortlaunch;step 1\\x07', end=''); print('\\x1b[1mloss\\x1b[0m', flush=True)"


@pytest.mark.parametrize("width", ["80", "", "wide"])
def test_the_live_line_is_on_the_terminal_alone(width: str, run: RunDir) -> None:
    """Logs hold plain lines only; a terminal also shows rank 0's live line until the end."""
    ended = guarded(run, LIVE, rank=0, ORTLAUNCH_PROGRESS=width)
    # Without the escape sequences of the live line and of the bold text.
    assert run.rank_log_path(0, "out").read_text() == "to stdout\nloss\n"
    assert ended.out.replace("\r\x1b[Kstep 1", "").replace("\r\x1b[K", "") == "to stdout\nloss\n"
    assert ended.out.endswith("\r\x1b[Kstep 1\r\x1b[K") is (width == "80")


def test_logs_of_a_continued_run_go_on(run: RunDir) -> None:
    """A second start in a folder appends to the logs, and changes their time at once."""
    guarded(run, "")
    log = run.rank_log_path(1, "err")
    # An old time of the file.
    os.utime(log, (1, 1))
    # The rank prints nothing, so only its start changes the time.
    guarded(run, "", QUIET="1")
    assert run.rank_log_path(1, "out").read_text() == "to stdout\n" * 2
    assert log.read_text() == "to stderr\n"
    assert log.stat().st_mtime > 1


@pytest.mark.parametrize(
    ("launcher", "rank", "life", "told"),
    [
        ("inside", 1, "raise ValueError('planted')", True),
        ("inside", 1, "os.kill(os.getpid(), 9)", True),
        ("inside", 1, "raise RuntimeError('Connection closed by peer')", False),
        ("mpi", 1, "raise ValueError('planted')", False),
        ("inside", 0, "raise ValueError('planted')", True),
    ],
)
def test_the_failing_rank_speaks_where_nobody_else_will(
    launcher: str, rank: int, life: str, told: bool, run: RunDir
) -> None:
    """Under the user's own launcher the cause is printed once, with its traceback."""
    write_plan(run, launcher)
    run.errors.mkdir()
    if not told:
        # A secondary failure waits for this mark of a printed cause.
        run.failure_printed.touch()
    ended = guarded(run, life, rank)
    assert ended.record is not None
    assert ended.err.endswith(f"ortlaunch: {ended.record['summary']}\n") is told
    assert ended.err.count("raise ValueError('planted')") <= 1
    assert run.failure_printed.exists()
    assert ("planted" in ended.err) == (told and "planted" in life)


def test_an_echo_of_a_cause_that_nobody_tells_speaks_itself(run: RunDir) -> None:
    """A secondary failure is printed where no cause appears, such as that of a lost host."""
    write_plan(run, "inside")
    ended = guarded(run, "raise RuntimeError('Connection closed by peer')")
    assert ended.record is not None
    assert ended.record["secondary"]
    assert ended.err.count("RuntimeError: Connection closed by peer") == 1
    assert ended.err.endswith(f"ortlaunch: {ended.record['summary']}\n")


def test_a_long_record_fits_the_reserved_space(tmp_path: Path) -> None:
    """On a full disk, long texts are cut; the end of the traceback stays."""
    spare = tmp_path / "spare"
    spare.write_bytes(bytes(32_000))
    texts = {name: name + "é" * 70_000 for name in ("message", "detail", "folded")}
    record = ErrorRecord(
        "ValueError", Cause.RAISED, 1, rank=1, traceback="é" * 50_000 + "the last line", **texts
    )
    end_record._overwrite_reserved_file_with_record(spare, record, 32_000)
    assert spare.stat().st_size <= 32_000
    cut_record = read_error_record_or_describe_damage(spare)
    assert (cut_record.rank, cut_record.message[:8], cut_record.detail[:7]) == (
        1,
        "messageé",
        "detailé",
    )
    assert cut_record.traceback.endswith("éthe last line")
