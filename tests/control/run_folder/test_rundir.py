"""Test the run folder: its paths, atomic writes of files, and complete checkpoints."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.run_folder import folder
from ortlaunch.run_folder.folder import (
    RunDir,
    read_json_or_raise_damaged,
    write_json_atomically,
    write_text_atomically,
)
from ortlaunch.run_folder.reference import run_folder_manual_page_markdown
from tests.makers import engine_report

# Attribute of RunDir -> path in the run folder. Written out, so that a renamed file
# fails the test.
PATHS = {
    "recipe": "recipe.yaml",
    "plan": "plan.json",
    "deepspeed": "deepspeed.json",
    "environment": "environment.json",
    "request": "request.sh",
    "hostfile": "hostfile",
    "store": "store",
    "rendezvous": "rendezvous",
    "meeting": "meeting",
    "agents": "agents.json",
    "submitted": "submitted.yaml",
    "manifest": "job.yaml",
    "job_script": "job.sh",
    "steps": "steps.json",
    "bad_steps": "bad_steps.jsonl",
    "logs": "logs",
    "errors": "errors",
    "flight_recorder": "errors/nccl_trace_rank_",
    "failure_printed": "errors/printed",
    "stall": "errors/stall.json",
    "attempts": "attempts",
    "ended_ranks": "ended_ranks",
    "slow_ranks": "slow_ranks.jsonl",
    "ready": "ready",
    "commands": "commands.jsonl",
    "modules": "modules",
    "requests": "requests",
    "stop_request": "requests/stop.json",
    "save_request": "requests/save.json",
    "cancelled": "requests/cancel",
    "stopped": "stopped.json",
    "lock": "lock",
    "output": "output.txt",
    "job": "job.json",
    "summary": "summary.json",
    "metrics": "metrics.jsonl",
    "parity": "parity.jsonl",
    "engine": "engine.json",
    "profile": "profile.json",
    "confusion": "confusion.json",
    "trace": "trace.json.gz",
    "memory": "memory.json",
    "micro_size": "micro_size.json",
    "trials": "micro_size",
    "trial": "trial.json",
    "tensorboard": "tensorboard",
    "stream": "stream",
    "checkpoints": "checkpoints",
    "resume": "resume.json",
    "saves": "saves.jsonl",
    "export": "export",
    "choice": "choice.json",
    "bench": "bench.json",
    "order": "order.json",
    "results": "results.jsonl",
    "report": "report.html",
    "vocabulary": "vocabulary.json",
    "tokenizer": "tokenizer",
    "launcher_error": "launcher_error.json",
    "lost": "errors/lost.json",
    "accounts": "errors/accounts",
    "fabric": "fabric.json",
    "restart_request": "requests/restart.json",
    "requeue_request": "requests/requeue",
    "evaluation": "evaluation.json",
    "trackers": "trackers",
    "exports": "exports.jsonl",
}


def test_paths() -> None:
    """Every path of a run is the one documented in ARCHITECTURE.md."""
    run = RunDir("runs/x")
    found = {
        name: str(getattr(run, name))
        for name, file in vars(RunDir).items()
        if isinstance(file, folder._FileRow)
    }
    assert found == {name: f"runs/x/{path}" for name, path in PATHS.items()}
    assert str(run) == "runs/x"
    assert str(run.rank_log_path(3, "err")) == "runs/x/logs/rank_00003.err"
    assert str(run.rank_log_path(123456, "out")) == "runs/x/logs/rank_123456.out"
    assert str(run.rank_error_path(3)) == "runs/x/errors/rank_00003.json"
    assert str(run.checkpoint_folder(500)) == "runs/x/checkpoints/step_00000500"


def test_complete_checkpoints(tmp_path: Path) -> None:
    """Only folders with the file COMPLETE count, sorted by step and not by name."""
    run = RunDir(tmp_path)
    assert run.complete_checkpoints() == []
    for name in (
        "step_00000300",
        "step_00000020",
        "step_100000000",
        "other",
        "step_x",
        "step_00000001.tmp",
    ):
        write_text_atomically(run.checkpoints / name / "COMPLETE", "")
    # Without the file COMPLETE, which is written last.
    (run.checkpoints / "step_00000400").mkdir()
    assert run.complete_checkpoints() == [
        (20, run.checkpoint_folder(20)),
        (300, run.checkpoint_folder(300)),
        (100_000_000, run.checkpoint_folder(100_000_000)),
    ]


def test_write_text(tmp_path: Path) -> None:
    """A file is written in UTF-8, with its folders, over an older one; no temporary file stays."""
    path = tmp_path / "a" / "b" / "file.txt"
    write_text_atomically(path, "old and longer")
    write_text_atomically(path, "né\nw\n")
    assert path.read_bytes() == "né\nw\n".encode()
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(("umask", "mode"), [(0o077, 0o600), (0o022, 0o644), (0o002, 0o664)])
def test_files_follow_the_umask(umask: int, mode: int, tmp_path: Path) -> None:
    """The mode of a file follows the user's umask, as for every file that the user creates."""
    # The umask belongs to the whole process, so it is restored.
    before = os.umask(umask)
    try:
        write_text_atomically(tmp_path / "file", "text")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_broken_write_leaves_the_old_file(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that fails on a full disk keeps the old file and leaves no part of the new one."""
    path = tmp_path / "file.json"
    write_text_atomically(path, "old")

    def full(*arguments: object) -> None:
        # ENOSPC
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, step, full)
    with pytest.raises(OSError, match="No space left"):
        write_text_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("value", [{"a": [1, 2.5, None, True], "é": {"b": "x"}}, [], "text", 0])
def test_json(value: Any, tmp_path: Path) -> None:
    """A value written as JSON is read back unchanged, and the file ends with a newline."""
    write_json_atomically(tmp_path / "x.json", value)
    assert read_json_or_raise_damaged(tmp_path / "x.json", type(value)) == value
    assert (tmp_path / "x.json").read_text().endswith("\n")


def test_json_that_cannot_be_written(tmp_path: Path) -> None:
    """A value that JSON cannot represent raises TypeError and leaves no file."""
    with pytest.raises(TypeError):
        write_json_atomically(tmp_path / "x.json", {"a": object()})
    assert list(tmp_path.iterdir()) == []


def test_json_has_no_infinity(tmp_path: Path) -> None:
    """Infinity and NaN are written, at any depth, as text that float() accepts."""
    # JSON has no number for them.
    inf = float("inf")
    nan = float("nan")
    write_json_atomically(tmp_path / "x.json", {"a": [inf, 1.0], "b": {"c": (-inf, nan)}})
    assert read_json_or_raise_damaged(tmp_path / "x.json") == {
        "a": ["inf", 1.0],
        "b": {"c": ["-inf", "nan"]},
    }


def test_the_page_of_the_run_folder_is_current() -> None:
    """docs/reference/run-folder.md is current: `ortlaunch schema --run-folder` prints the same page."""
    # To be regenerated, with `> docs/reference/run-folder.md`, after every change of a run's files.
    page = Path(__file__).parents[3] / "docs" / "reference" / "run-folder.md"
    assert page.read_text(encoding="utf-8") == run_folder_manual_page_markdown()


def test_a_field_without_a_value_is_null_empty_or_left_out() -> None:
    """A field without a value is null, empty or absent, as docs/reference/run-folder.md documents it."""
    # `onnxruntime` is present for every engine, so that a reader can look up keys in it.
    written = engine_report("eager").to_json()
    assert (written["attention"], written["onnxruntime"], written["unused_parameters"]) == (
        None,
        {},
        [],
    )
    assert {"inductor", "parity"}.isdisjoint(written)
    assert written["engine"] == {"asked": "eager", "used": "eager", "fallback_reason": None}
    lines = run_folder_manual_page_markdown().splitlines()
    for name, kind in (("attention", "text or null"), ("onnxruntime", "[OnnxRuntime](#OnnxRuntime) or {}"),
                       ("parity", "[Parity](#Parity) or absent"), ("unused_parameters", "list of text")):  # fmt: skip
        assert any(line.startswith(f"| `{name}` | {kind} |") for line in lines), name
