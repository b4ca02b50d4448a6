"""`ortlaunch export` of a run that was trained."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.e2e.runs import BERT, COMMAND, EAGER, Train, ended_well, environment, merged
from tests.ort import needs_ort


@needs_ort
@pytest.mark.slow
@pytest.mark.ci
def test_onnx(train: Train, home: Path) -> None:
    """It says how far onnxruntime and PyTorch differ, on the screen and in exports.jsonl; a second one is refused."""
    run = ended_well(train("to-onnx", merged(BERT, {**EAGER, "train": {"max_steps": 6}})))
    command = [str(COMMAND), "export", "to-onnx", "--format=onnx"]
    done, again = (
        subprocess.run(
            command, cwd=home, env=environment(home), capture_output=True, text=True, timeout=120, check=False
        )
        for _ in range(2)
    )
    assert done.returncode == 0, done.stderr
    assert "onnxruntime's logits differ from PyTorch's by at most" in done.stdout
    assert {"exports/step_00000006_onnx/model.onnx", "exports/step_00000006_onnx/tokenizer.json"} <= run.files()
    (line,) = [json.loads(text) for text in (run.folder / "exports.jsonl").read_text().splitlines()]
    assert (line["step"], line["onnx"]["outputs"]) == (6, ["logits"])
    assert line["onnx"]["largest_difference"] < 1e-4
    assert again.returncode == 2
    assert "is there already" in again.stderr
