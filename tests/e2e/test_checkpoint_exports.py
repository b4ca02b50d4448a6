"""`checkpoint.export`: each kept checkpoint as a model, written beside training."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from ortlaunch.run_folder.folder import RunDir
from tests.e2e.runs import (
    BERT,
    COMMAND,
    EAGER,
    TOY,
    TWO_RANKS,
    Run,
    Train,
    ended_well,
    environment,
    merged,
)
from tests.e2e.test_lora import MERGED
from tests.ort import needs_ort

BOTH: dict[str, Any] = {
    "checkpoint": {"every_steps": 6, "keep": 1, "export": ["huggingface", "onnx"]}
}


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "exports.jsonl").read_text().splitlines()]


def folders(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "exports").iterdir())


def difference_at(run: Run, step: int, monkeypatch: pytest.MonkeyPatch) -> float:
    """Return the largest difference of a model.onnx from the model with the checkpoint's weights."""
    import onnxruntime

    from ortlaunch.worker.export.export_checkpoint import (
        load_recipe_trained_model_and_data_of_checkpoint,
    )

    monkeypatch.setenv("ORTLAUNCH_CACHE", str(run.folder.parent / "cache"))
    monkeypatch.chdir(run.folder.parent)
    found = RunDir(run.folder)
    _, whole, _ = load_recipe_trained_model_and_data_of_checkpoint(found, step)
    session = onnxruntime.InferenceSession(str(found.export_folder(step, "onnx") / "model.onnx"))
    words = torch.randint(0, 60, (3, 9), generator=torch.Generator().manual_seed(step))
    batch = {"input_ids": words, "attention_mask": torch.ones_like(words)}
    if "token_type_ids" in {one.name for one in session.get_inputs()}:
        batch["token_type_ids"] = torch.zeros_like(words)
    ours = session.run(["logits"], {name: value.numpy() for name, value in batch.items()})[0]
    with torch.no_grad():
        theirs = whole.model.eval().float()(**batch).logits
    return float((torch.from_numpy(ours) - theirs).abs().max())


@needs_ort
@pytest.mark.slow
def test_each_kept_checkpoint_is_exported(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both formats of the kept checkpoint exist, and no others; ONNX is that step's model."""
    run = ended_well(train("bert", merged(BERT, BOTH)))
    assert [step for step, _ in RunDir(run.folder).complete_checkpoints()] == [12]
    # The first export of step 6 was made, and deleted with its checkpoint.
    assert "export of step 6: " in run.out
    assert folders(run.folder) == ["step_00000012", "step_00000012_onnx"]
    assert {line["automatic"] for line in lines(run.folder)} == {True}
    assert difference_at(run, 12, monkeypatch) < 1e-4
    assert "onnxruntime's outputs differ from PyTorch's by at most" in run.out
    # The export of the last step is the run's own.
    (one, other) = (
        run.folder / folder / "model.safetensors" for folder in ("exports/step_00000012", "export")
    )
    assert one.read_bytes() == other.read_bytes()
    assert json.loads((run.folder / "summary.json").read_text())["failed_exports"] == 0


@needs_ort
@pytest.mark.slow
def test_adapters_on_two_sharded_ranks(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """With LoRA under ZeRO 1, rank 0 exports the merged model; the losses stay bit for bit."""
    sharded = merged(MERGED, {"zero": {"stage": 1}})
    plain = ended_well(train("plain", sharded, *TWO_RANKS))
    run = ended_well(
        train("sharded", merged(sharded, {"checkpoint": {"export": ["onnx"]}}), *TWO_RANKS)
    )
    assert run.losses() == plain.losses()
    assert folders(run.folder) == ["step_00000006_onnx"]
    assert len(lines(run.folder)) == 1
    assert difference_at(run, 6, monkeypatch) < 1e-4


@pytest.mark.slow
@pytest.mark.ci
def test_a_failed_export_ends_no_run(train: Train) -> None:
    """It is printed, recorded and counted, and the training goes on; the next start repeats it."""
    recipe = merged(merged(TOY, EAGER), {"checkpoint": {"export": ["onnx"]}})
    run = ended_well(train("failed", recipe))
    assert "NOT EXPORTED: checkpoint.export: step 10 as onnx: " in run.out
    assert "1 exports failed: exports.jsonl" in run.out
    assert "forward" in lines(run.folder)[0]["error"]
    assert json.loads((run.folder / "summary.json").read_text())["failed_exports"] == 1
    assert folders(run.folder) == []


@pytest.mark.slow
@pytest.mark.ci
def test_a_killed_export_is_repeated(home: Path, train: Train) -> None:
    """A kill during an export leaves no half export; the next start writes it."""
    recipe = merged(merged(BERT, EAGER), merged(BOTH, {"checkpoint": {"export": ["onnx"]}}))
    (home / "killed.yaml").write_text(yaml.safe_dump(recipe))
    command = subprocess.Popen(
        [str(COMMAND), "train", "killed.yaml", "--run-dir=killed"],
        cwd=home, env=environment(home), start_new_session=True,
    )  # fmt: skip
    exports = home / "killed/exports"
    deadline = time.monotonic() + 90
    while not (exports.exists() and any(exports.glob("*.partial"))):
        assert command.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(command.pid, signal.SIGKILL)
    command.wait()
    # Its child ends with it, soon.
    time.sleep(1)
    assert all(name.endswith(".partial") for name in folders(home / "killed"))
    run = ended_well(train("killed", recipe))
    assert folders(run.folder) == ["step_00000012_onnx"]
