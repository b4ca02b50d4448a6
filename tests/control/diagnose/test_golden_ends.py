"""Each kind of end has one verdict, which every command renders: ends.json has all of them."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from ortlaunch.diagnose.conclude import conclude_run
from ortlaunch.launch import JobState
from ortlaunch.launch.record import JobRecord
from ortlaunch.run_folder.folder import (
    COMPLETE,
    RunDir,
    write_json_atomically,
    write_text_atomically,
)
from ortlaunch.run_folder.verdict import Verdict
from tests.control.diagnose.test_diagnose import ENDS, RANKS, conclude, made
from tests.golden_ends import compare_with_golden_file

GOLDEN = Path(__file__).with_name("ends.json")
TRACEBACK = 'Traceback (most recent call last):\n  File "mine.py", line 3\nValueError: planted'


def _save_on_request(run: RunDir) -> Verdict:
    stopped = {"step": 7, "steps": 9, "by": "`ortlaunch stop` of me on host a", "exit_status": 85}
    write_json_atomically(run.stopped, stopped)
    return conclude_run(run, 85)


def _outlive_the_grace_period(run: RunDir) -> Verdict:
    write_text_atomically(run.checkpoint_folder(4) / COMPLETE, "")
    record = {"rank": 1, "host": "a", "type": "Outlived", "cause": "outlived", "exit_status": 85,
              "signal": 15, "secondary": True, "summary": "rank 1 on host a was ended by SIGKILL"}  # fmt: skip
    write_json_atomically(run.rank_error_path(1), record)
    return conclude_run(run, 1, user_signal=signal.SIGTERM)


def _raise_in_the_users_file(run: RunDir) -> Verdict:
    record = {"rank": 1, "host": "a", "type": "ValueError", "cause": "raised", "exit_status": 1,
              "detail": "ValueError: planted", "message": "planted", "traceback": "whole",
              "folded": TRACEBACK, "raised_at": "mine.py:3", "step": 4, "time": 1.0,
              "summary": "rank 1 on host a failed with ValueError; exit status 1"}  # fmt: skip
    write_json_atomically(run.rank_error_path(1), record)
    return conclude_run(run, 1).with_note("not restarted: the same failure")


# Ends that neither a rank's record nor the command's failure alone describes.
OTHERS: Mapping[str, Callable[[RunDir], Verdict]] = {
    "done": lambda run: Verdict(0, f"done: {run}", continue_command="ortlaunch train x.yaml"),
    "saved on request": _save_on_request,
    "outlived": _outlive_the_grace_period,
    "raised in the user's file": _raise_in_the_users_file,
}


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No run has measured the process's own memory."""
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("kind", RANKS)
def test_the_end_of_a_rank(kind: str, tmp_path: Path) -> None:
    """A rank recorded the end."""
    compare_with_golden_file(GOLDEN, kind, made(tmp_path, cause=kind, **RANKS[kind][0]))


@pytest.mark.parametrize("kind", ENDS)
def test_an_end_that_the_command_detected(kind: str, tmp_path: Path) -> None:
    """No rank recorded the end."""
    run = made(tmp_path)
    conclude(run, failure=ENDS[kind])
    compare_with_golden_file(GOLDEN, f"command: {kind}", run)


@pytest.mark.parametrize("kind", OTHERS)
def test_another_end(kind: str, tmp_path: Path) -> None:
    """The run ended well, was stopped, or failed in the user's file."""
    run = made(tmp_path)
    verdict = OTHERS[kind](run)
    job = JobRecord.for_this_process("torchrun", JobState.RUNNING)
    job.copy_ended_now(JobState.state_of_exit_status(verdict.exit_status), verdict).write(run)
    compare_with_golden_file(GOLDEN, kind, run)


def test_the_file_has_no_other_end() -> None:
    """An end that is tested no more leaves the file."""
    assert set(json.loads(GOLDEN.read_text())) == {
        *RANKS,
        *(f"command: {kind}" for kind in ENDS),
        *OTHERS,
    }
