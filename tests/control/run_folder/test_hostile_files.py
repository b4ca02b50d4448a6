"""Run folders of others: no pipe or device blocks a reader, and no JSON value ends it with a bug."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ortlaunch.base import json_types
from ortlaunch.base.cause import Cause, Failure
from ortlaunch.base.errors import DamagedFile, InputError, PlanError
from ortlaunch.base.units import number_or_none
from ortlaunch.launch import JobState
from ortlaunch.launch.record import JobRecord
from ortlaunch.launch_plan import Plan
from ortlaunch.report.records import finite_number_or_none as number_of_report
from ortlaunch.run_folder.error_record import read_error_record_or_describe_damage
from ortlaunch.run_folder.folder import RunDir, read_json_or_raise_damaged, write_text_atomically
from ortlaunch.run_folder.lines import (
    append_json_line,
    read_json_lines_in_tail_or_whole_if_damaged,
    read_json_lines_with_keys,
)
from ortlaunch.run_folder.lock import RunLock, process_that_last_locked_run
from ortlaunch.run_folder.verdict import Verdict
from ortlaunch.started_runs.status import read_status
from tests.makers import host, plan, recipe

DEEP = "[" * 20_000 + "]" * 20_000
LARGE = "1" + 400 * "0"
# The places of a value of a finished run, and hostile values there.
PLACES = {
    "job.json": (
        "verdict",
        "started",
        "ended",
        "exit_status",
        "failure",
        "attempts",
        "id",
        "state",
    ),
    "plan.json": ("nodes", "world_size", "task", "batch", "env", "memory", "modules"),
    "metrics.jsonl": ("step", "loss", "elapsed_seconds"),
    "errors/rank_00000.json": ("cause", "time", "summary", "signal", "rank"),
}
VALUES = [DEEP, '"\\ud800"', LARGE, "1" + 5000 * "0", "-1", "[]", "{}", "null", "true", '""', "NaN"]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """The folder of a failed run."""
    run = RunDir(tmp_path)
    write_text_atomically(run.plan, plan(recipe(), [host("a", 2)], "torchrun").to_json())
    JobRecord.for_this_process("torchrun", JobState.RUNNING).copy_ended_now(
        JobState.FAILED, Verdict(1, "x", Failure(Cause.RAISED, "x"), "x", "Traceback", ("y",))
    ).write(run)
    append_json_line(run.metrics, {"step": 3, "loss": 0.5, "elapsed_seconds": 1.0})
    write_text_atomically(
        run.rank_error_path(0), '{"cause": "raised", "time": 1.0, "summary": "x", "rank": 0}'
    )
    write_text_atomically(run.request, "")
    return run


@pytest.mark.parametrize("name", PLACES)
def test_any_value_in_a_record(name: str, run: RunDir) -> None:
    """Each hostile value of each field gives a status, or a clear error, and can be printed."""
    # The text of the status is written, because a surrogate fails only then.
    path = run.path / name
    good = json.loads(path.read_text())
    for field in PLACES[name]:
        for value in VALUES:
            text = json.dumps({**good, field: "@"}).replace('"@"', value)
            path.write_text(f"{text}\n")
            with contextlib.suppress(InputError):
                write_text_atomically(run.report, str(read_status(run)))
    read_error_record_or_describe_damage(run.rank_error_path(0))


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", ["a pipe", "a device"])
def test_no_reader_waits_for_a_pipe_or_a_device(kind: str, run: RunDir) -> None:
    """Each reader refuses a pipe and a device by name, at once."""

    def look(name: str, reader: Callable[[Path], object]) -> None:
        path = run.path / name
        path.unlink(missing_ok=True)
        os.mkfifo(path) if kind == "a pipe" else path.symlink_to("/dev/zero")
        with pytest.raises(DamagedFile, match=f"{name}: is no regular file, but a folder, a pipe"):
            reader(path)

    # A pipe without a writer blocks whoever opens it; a device never ends.
    look("summary.json", read_json_or_raise_damaged)
    look("saves.jsonl", read_json_lines_with_keys)
    look("metrics.jsonl", lambda path: read_json_lines_in_tail_or_whole_if_damaged(path, 100))
    look("plan.json", Plan.read)
    run.lock.symlink_to("/dev/zero") if kind == "a device" else os.mkfifo(run.lock)
    assert process_that_last_locked_run(run) is None
    with pytest.raises(PlanError, match="lock is no regular file; remove it"), RunLock() as lock:
        lock.lock_and_record_holder_or_refuse(run)


def test_a_file_that_is_too_large(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record larger than any run's is refused unread."""
    monkeypatch.setattr(json_types, "_MOST_RECORD_BYTES", 9)
    with pytest.raises(DamagedFile, match=r"plan\.json: has more than 9 bytes"):
        json_types.read_regular_file_bytes_or_refuse(run.plan)


class Pair(NamedTuple):
    left: int
    right: tuple[str, ...] = ()


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        (int, [1], [True, 1.0, "1", 1 << 63, None]),
        (float, [1, 1.5], [True, "1", 1 << 63]),
        (bool, [True], [1, 0]),
        (str | None, ["a", None], [1, []]),
        (tuple[str, ...], [[], ["a"]], ["ab", [1], None]),
        (tuple[str, int], [["a", 1]], [["a"], [1, "a"]]),
        (list[list[int]], [[[1]]], [[1], [["1"]]]),
        (dict[str, dict[str, int]], [{"a": {"b": 1}}], [{"a": 1}, {"a": {"b": "1"}}, []]),
        (Pair, [Pair(1, ("a",))], [Pair(1, 2), (1, ())]),  # type: ignore[arg-type]
        (Any, [1, None], []),
    ],
)
def test_types_at_any_depth(kind: Any, right: list[object], wrong: list[object]) -> None:
    """Values fit an annotation, or do not, however deep the wrong value is."""
    assert [json_types.value_fits_annotation_at_any_depth(kind, value) for value in right] == [
        True
    ] * len(right)
    assert [json_types.value_fits_annotation_at_any_depth(kind, value) for value in wrong] == [
        False
    ] * len(wrong)


def test_numbers_that_no_float_holds() -> None:
    """A number that is too large is no number of a record."""
    assert number_or_none(int(LARGE)) is number_of_report(int(LARGE)) is None


def test_a_full_disk_is_named_with_its_file() -> None:
    """An append that fails names its file."""
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        append_json_line(Path("/dev/full"), {})
