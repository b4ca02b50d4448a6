"""Damaged files of a run folder: each command names the file and reads the rest.

A file may be cut, empty, binary or of another version.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.api import generate
from ortlaunch.api.export import existing_requested_or_newest_step_or_refuse
from ortlaunch.base.errors import DamagedFile, OrtlaunchError
from ortlaunch.report import write_report_page
from ortlaunch.resolve import resume
from ortlaunch.run.run_completion import nothing_to_train_text_if_readable
from ortlaunch.run_folder import lock
from ortlaunch.run_folder.folder import (
    RunDir,
    read_json_or_raise_damaged,
    write_json_atomically,
    write_text_atomically,
)
from ortlaunch.run_folder.lines import append_json_line, read_json_lines_with_keys
from ortlaunch.run_folder.resume_record import FROM_THE_BEGINNING
from ortlaunch.started_runs import listing, logs, registry, status
from ortlaunch.started_runs.diagnosis import diagnose_run
from ortlaunch.started_runs.runs_table import runs_table_text
from ortlaunch.tables.tasks import GenerationRequest
from tests.control.test_report import made, steps
from tests.makers import recipe

MOST = 3  # damages tried on each file; all of them, some 450, take minutes
VERBS: dict[str, Callable[[RunDir], Any]] = {
    "status": lambda run: f"{status.read_status(run)}",
    "report": lambda run: write_report_page([run.path], run.path / "page.html", "now"),
    "diagnose": lambda run: f"{diagnose_run(run)}",
    "logs": lambda run: list(logs.iterate_rank_output_text(run, 0, follows_until_end=False)),
    "list": lambda run: runs_table_text(listing.newest_statuses_that_match(None), 80),
    "export": lambda run: existing_requested_or_newest_step_or_refuse(run, None),
    "generate": lambda run: generate._model_or_run_folder_step_and_is_trained_on_chats(
        GenerationRequest(str(run.path), "The", None, 5, 0.0, 0, False)
    ),
    "train again": lambda run: (
        nothing_to_train_text_if_readable(recipe(), run),
        resume.choose_checkpoint_to_resume(run, resume.AUTOMATIC_RESUME),
    ),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a failed run, with a file of each kind."""
    folder = made(
        tmp_path_factory.mktemp("whole") / "run",
        steps(3.0, 2.0, 1.0),
        verdict="rank 1 failed",
    )
    run = RunDir(folder)
    job = {**read_json_or_raise_damaged(run.job), "state": "failed", "exit_status": 1}
    write_json_atomically(run.job, job)
    write_json_atomically(run.summary, {"steps": 20, "seconds": {"training": 1.0}, "best": None})
    write_json_atomically(run.steps, {"epochs": 1.0, "samples": 10, "max_steps": 20})
    replace(FROM_THE_BEGINNING, step=20).write(run)
    write_json_atomically(run.environment, {"host": "a", "packages": {}})
    account = {
        "rank": 1,
        "host": "a",
        "type": "ValueError",
        "summary": "rank 1 failed",
        "message": "no",
        "time": 1.0,
    }
    write_json_atomically(
        run.rank_error_path(1),
        {**account, "traceback": "", "secondary": False, "exit_status": 1, "signal": None},
    )
    append_json_line(run.saves, {"step": 20, "seconds": 1.0})
    append_json_line(
        run.bad_steps,
        {"step": 3, "kind": "loss", "action": "skip", "message": "nan", "samples": [1]},
    )
    append_json_line(run.exports, {"step": 20, "format": "onnx", "folder": "x"})
    write_json_atomically(run.evaluation_folder(20).evaluation, {"step": 20, "loss": 1.0})
    write_text_atomically(run.rank_log_path(0, "out"), "said\n")
    (run.checkpoint_folder(20)).mkdir(parents=True)
    # The last file of a checkpoint: without it the folder does not count as one.
    (run.checkpoint_folder(20) / "COMPLETE").touch()
    return folder


def damages(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the ways in which a file may be damaged: a name and the contents."""
    content = path.read_bytes()
    yield from (
        ("empty", b""),
        ("cut", content[: len(content) // 2]),
        ("without its end", content[:-3]),
    )
    yield from (
        ("binary", bytes(range(256))),
        ("a list", b"[]\n"),
        ("nothing", b"null\n"),
        ("a number", b"1\n"),
    )
    yield from (("no field", b"{}\n"), ("a word", b'"x"\n'), ("deep", b"[" * 20 + b"\n"))
    if path.suffix not in (".json", ".jsonl"):
        return
    # A file of JSON lines is replaced by one changed line, its first one.
    values = json.loads(content if path.suffix == ".json" else content.splitlines()[0])
    for name in values:
        rest = {other: value for other, value in values.items() if other != name}
        yield f"without {name}", json.dumps(rest).encode() + b"\n"
        for value in (None, "?", [1], {"a": 1}):
            yield f"{name}: {value}", json.dumps({**rest, name: value}).encode() + b"\n"
    # A later version of ortlaunch may write further keys.
    yield "with more", json.dumps({**values, "later": 1}).encode() + b"\n"


def test_no_verb_ends_in_a_traceback(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With any file damaged, each command returns a result or raises an error of ours."""
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(
        lock, "living_process_ids", lambda run: []
    )  # slow: it reads every process here
    # A fixed seed: a failure can be repeated.
    drawn = random.Random(7)
    run = RunDir(shutil.copytree(whole, tmp_path / "run"))
    wrong = []
    registry.register_run_or_print_error(run)
    for path in sorted(
        each
        for each in run.path.rglob("*.*")
        if each.is_file() and each.suffix[1:4] in ("jso", "yam")
    ):
        content = path.read_bytes()
        for how, damaged in drawn.sample([*damages(path)], MOST):
            path.write_bytes(damaged)
            for verb, act in VERBS.items():
                try:
                    act(run)
                except OrtlaunchError:
                    pass
                # Any other type would reach the user as a traceback.
                except Exception as error:
                    wrong.append(f"{verb}, {path.name} {how}: {type(error).__name__}: {error}")
        path.write_bytes(content)
    assert not wrong, "\n".join(wrong)


def test_status_reads_the_rest_and_says_what_it_left_out(whole: Path, tmp_path: Path) -> None:
    """`status` leaves out an unreadable line, plan and recipe, reports each, and reads the rest."""
    run = RunDir(shutil.copytree(whole, tmp_path / "run"))
    lines = run.metrics.read_text().splitlines(keepends=True)
    # A crash cut the second line, and the next start wrote its own lines directly after it.
    run.metrics.write_text("".join([lines[0], lines[1][:9], lines[0], lines[2]]))
    run.plan.write_text("")
    run.recipe.write_text("model: [")
    found = status.read_status(run)
    assert (found.step, found.metrics["loss"], found.ranks, found.steps) == (30, 1.0, None, None)
    left = found.unreadable[2]
    plan = found.unreadable[0]
    given = found.unreadable[1]
    assert left == "metrics.jsonl:2 is left out: no whole line of JSON"
    assert plan.startswith(f"{run.plan}: is not a plan, is damaged, or is of another version")
    assert given.startswith(f"{run.recipe}: is not a recipe, is damaged, or is of another version")
    assert all(line in str(found).splitlines() for line in found.unreadable)
    assert json.loads(found.to_json())["unreadable"] == list(found.unreadable)


def test_the_number_of_a_line_in_a_long_file(whole: Path, tmp_path: Path) -> None:
    """The reported line number counts from the beginning of the file, although its end is read."""
    run = RunDir(shutil.copytree(whole, tmp_path / "run"))
    good = run.metrics.read_bytes().splitlines(keepends=True)[0]
    # Longer than the part that `status` reads from the end.
    run.metrics.write_bytes(good * 3000 + b"\xff{\n" + good)
    assert status.read_status(run).unreadable == (
        "metrics.jsonl:3001 is left out: no whole line of JSON",
    )


def test_a_line_after_half_a_one_is_not_lost(tmp_path: Path) -> None:
    """After half a line of a killed process, the next start writes on a new line."""
    path = tmp_path / "lines.jsonl"
    append_json_line(path, {"step": 1})
    path.write_bytes(path.read_bytes() + b'{"step": 2, "lo')
    append_json_line(path, {"step": 3, "loss": float("inf")})
    lines = read_json_lines_with_keys(path, "step")
    assert lines.values == [{"step": 1}, {"step": 3, "loss": "inf"}]
    assert lines.unreadable == ["lines.jsonl:2 is left out: no whole line of JSON"]
    assert (
        read_json_lines_with_keys(path, "loss").unreadable[0]
        == "lines.jsonl:1 is left out: it has no loss"
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is damaged: it is empty"),
        (b'{"a": 1', "is damaged: not JSON at line 1, column 8"),
        (b"\xff\xfe", "is damaged: not text"),
        (b"[1]", "is damaged: it is not a mapping"),
        (b"{}", "has no 'steps': it is damaged, or of another version of ortlaunch"),
    ],
)
def test_what_is_wrong_with_a_file(content: bytes, said: str, tmp_path: Path) -> None:
    """A damaged file ends a command with status 2, the name of the file and the reason."""
    path = tmp_path / "summary.json"
    path.write_bytes(content)
    with pytest.raises(DamagedFile, match=rf"summary\.json: {said}") as error:
        read_json_or_raise_damaged(path)["steps"]
    assert error.value.exit_status == 2
