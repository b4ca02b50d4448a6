"""Tests of `ortlaunch export`: the checkpoint, the folder, and refusals before a process starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ortlaunch.api import export as exports
from ortlaunch.api.export import ExportOptions
from ortlaunch.base.errors import InputError
from ortlaunch.run_folder.folder import RunDir, write_json_atomically
from ortlaunch.tables import tasks


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run with checkpoints of steps 10 and 20, and a partial one of step 30."""
    found = RunDir(tmp_path / "run")
    for step in (10, 20):
        found.checkpoint_folder(step).mkdir(parents=True)
        (found.checkpoint_folder(step) / "COMPLETE").touch()
    found.partial_checkpoint_folder(30).mkdir()
    for path in (found.plan, found.recipe):
        path.touch()
    return found


@pytest.mark.parametrize(
    ("step", "to", "form", "message"),
    [
        (None, None, "gguf", "--format: got 'gguf'; one of huggingface, onnx, ondevice"),
        # The checkpoint of step 30 is partial.
        (30, None, "huggingface", "has no complete checkpoint of step 30; it has steps 10, 20"),
        (
            None,
            Path(),
            "huggingface",
            r"\. exists already; remove it, or give another folder with --to",
        ),
    ],
)
def test_refusals(step: int | None, to: Path | None, form: str, message: str, run: RunDir) -> None:
    """An unknown format or step and an existing folder are refused with the alternatives."""
    with pytest.raises(InputError, match=message):
        exports.export_checkpoint_and_push_if_requested(run, ExportOptions(step, to, form))


def test_adapters_as_nobody_knows(run: RunDir) -> None:
    """An unknown form of adapters is refused, and so is an upload of artifacts for devices."""
    with pytest.raises(
        InputError,
        match="--push uploads a model in --format huggingface or onnx; got --format ondevice",
    ):
        exports.export_checkpoint_and_push_if_requested(
            run, ExportOptions(export_format="ondevice", push_target="me/mine")
        )
    with pytest.raises(InputError, match="--lora: got 'apart'; one of merged, alone"):
        exports.export_checkpoint_and_push_if_requested(run, ExportOptions(lora_form="apart"))


def test_the_best_checkpoint(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--step best` takes the checkpoint of keep_best; without it a line names that checkpoint."""
    with pytest.raises(InputError, match=r"--step best: .* is not set, or the training has not en"):
        exports.existing_requested_or_newest_step_or_refuse(run, "best")
    write_json_atomically(run.summary, {"steps": 20, "best": {"step": 10}})
    assert exports.existing_requested_or_newest_step_or_refuse(run, "best") == 10
    monkeypatch.setattr(tasks, "run_task_and_return_stdout_or_raise", lambda request, shown: None)
    exports.export_checkpoint_and_push_if_requested(run, ExportOptions(), ("stdout",))
    note = "step 20 is the newest checkpoint; the best is of step 10: --step best\n"
    assert capsys.readouterr().out == note
    exports.export_checkpoint_and_push_if_requested(run, ExportOptions(step=20), ("stdout",))
    # It may be deleted by hand.
    (run.checkpoint_folder(10) / "COMPLETE").unlink()
    exports.export_checkpoint_and_push_if_requested(run, ExportOptions(), ("stdout",))
    assert capsys.readouterr().out == ""


def test_no_run_and_no_checkpoint(run: RunDir, tmp_path: Path) -> None:
    """A folder of no run is refused, and so is a run without a checkpoint."""
    with pytest.raises(InputError, match="is not a run folder"):
        exports.export_checkpoint_and_push_if_requested(RunDir(tmp_path), ExportOptions())
    for step in (10, 20):
        (run.checkpoint_folder(step) / "COMPLETE").unlink()
    with pytest.raises(InputError, match="has no complete checkpoint"):
        exports.export_checkpoint_and_push_if_requested(run, ExportOptions())


@pytest.mark.parametrize(("step", "taken"), [(None, 20), (10, 10)])
def test_what_is_started(
    step: int | None, taken: int, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requested or newest checkpoint is exported to a folder of its step."""
    started: list[Any] = []
    monkeypatch.setattr(
        tasks, "run_task_and_return_stdout_or_raise", lambda request, shown: started.append(request)
    )
    folder = run.path / "exports" / f"step_{taken:08d}"
    assert exports.export_checkpoint_and_push_if_requested(run, ExportOptions(step)) == folder
    assert started == [tasks.ExportRequest(str(run), taken, str(folder), "huggingface")]
