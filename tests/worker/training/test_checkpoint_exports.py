"""Exports of `checkpoint.export` that cannot begin, and those that a removal of checkpoints spares."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ortlaunch.run_folder.export_records import ExportLine
from ortlaunch.run_folder.folder import COMPLETE, RunDir
from ortlaunch.run_folder.lines import append_json_line, read_json_lines_with_keys
from ortlaunch.run_folder.records import json_values_of_record
from ortlaunch.worker.checkpoint.saver import remove_old_checkpoints_and_exports
from ortlaunch.worker.supervision.progress import Progress
from ortlaunch.worker.training.checkpoint_exports import (
    CheckpointExports,
    unrepeated_failed_export_count,
)
from tests.makers import recipe


def checkpoints(run: RunDir, *steps: int) -> None:
    for step in steps:
        run.checkpoint_folder(step).mkdir(parents=True)
        (run.checkpoint_folder(step) / COMPLETE).touch()


def exports(run: RunDir) -> CheckpointExports:
    session: Any = SimpleNamespace(
        run=run,
        recipe=recipe(checkpoint={"export": ["huggingface"]}),
        group=SimpleNamespace(rank=0),
        progress=Progress(rank=1),
    )
    return CheckpointExports(session)


def test_what_cannot_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A removed checkpoint, a user's export and a process that cannot start are reported."""

    def no_memory(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(subprocess, "Popen", no_memory)
    run = RunDir(tmp_path)
    checkpoints(run, 1, 2)
    run.export_folder(2, "huggingface").mkdir(parents=True)
    writing = exports(run)
    # The user's export counts as made at a start; a newer checkpoint of that step has none.
    assert [*writing.queued_exports] == [(1, "huggingface")]
    writing.queue_all_or_missing_exports_on_rank_0(2)
    writing.queue_all_or_missing_exports_on_rank_0(3)
    writing.wait_until_all_exports_end()
    out = capsys.readouterr().out
    assert "step 1 as huggingface: [Errno 12] Cannot allocate memory" in out
    assert "exists already, by `ortlaunch export`; training is not affected" in out
    assert "step 3 as huggingface: left out: checkpoint.keep has removed it" in out
    assert [line["step"] for line in read_json_lines_with_keys(run.exports).values] == [1, 2]
    assert unrepeated_failed_export_count(run) == 2
    assert run.export_folder(2, "huggingface").exists()


def test_only_automatic_exports_are_deleted(tmp_path: Path) -> None:
    """With its checkpoint goes an automatic export, and half of one, but none of the user's."""
    run = RunDir(tmp_path)
    checkpoints(run, 1, 2, 3)
    for step, form, automatic in ((1, "onnx", True), (1, "huggingface", False), (3, "onnx", True)):
        run.export_folder(step, form).mkdir(parents=True)
        # The run folder has been moved since.
        line = ExportLine(
            step, form, f"/moved/{run.export_folder(step, form).name}", automatic=automatic
        )
        append_json_line(run.exports, json_values_of_record(line))
    run.export_folder(2, "onnx").with_name("step_00000002_onnx.partial").mkdir()
    remove_old_checkpoints_and_exports(run, 1, None)
    left = sorted(path.name for path in (tmp_path / "exports").iterdir())
    assert left == ["step_00000001", "step_00000003_onnx"]
