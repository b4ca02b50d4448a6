"""What is made of a run that was trained: `ortlaunch export --format onnx` and `ortlaunch evaluate`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from ortlaunch.recipe import parse_resolved
from ortlaunch.worker.data import Data, collate
from tests.e2e.runs import BERT, COMMAND, EAGER, TWO_RANKS, Run, Train, ended_well, environment, merged
from tests.ort import needs_ort

pytestmark = [needs_ort, pytest.mark.slow, pytest.mark.ci]


@pytest.fixture(scope="module")
def trained(train: Train) -> Run:
    """A BERT after six steps of masked words."""
    return ended_well(train("trained", merged(BERT, {**EAGER, "train": {"max_steps": 6}})))


def ortlaunch(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [str(COMMAND), *words]
    return subprocess.run(
        command, cwd=home, env=environment(home), capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture(scope="module")
def exported(trained: Run, home: Path) -> Path:
    """The folder of model.onnx."""
    done = ortlaunch(home, "export", "trained", "--format=onnx")
    assert done.returncode == 0, done.stderr
    assert "onnxruntime's logits differ from PyTorch's by at most" in done.stdout
    return trained.folder / "exports/step_00000006_onnx"


def test_an_export_is_told(trained: Run, exported: Path, home: Path) -> None:
    """exports.jsonl has how far onnxruntime and PyTorch differ; the folder is not written again."""
    assert {"model.onnx", "config.json", "tokenizer.json"} <= {path.name for path in exported.iterdir()}
    (line,) = [json.loads(text) for text in (trained.folder / "exports.jsonl").read_text().splitlines()]
    assert (line["step"], line["onnx"]["outputs"]) == (6, ["logits"])
    assert line["onnx"]["largest_difference"] < 1e-4
    again = ortlaunch(home, "export", "trained", "--format=onnx")
    assert (again.returncode, "is there already" in again.stderr) == (2, True)


def evaluated(home: Path, *words: str) -> dict[str, Any]:
    done = ortlaunch(home, "evaluate", "trained", *words)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    path = home / "trained/evaluations/step_00000006/evaluation.json"
    assert "masked word accuracy" in done.stdout
    return dict(json.loads(path.read_text()))


def test_one_number(trained: Run, exported: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank of eager, two of ort, plain transformers and model.onnx: one loss, perplexity and accuracy."""
    import onnxruntime
    from transformers import BertForMaskedLM

    found = evaluated(home)
    for name in ("loss", "perplexity", "masked_word_accuracy"):  # as training itself evaluated
        assert found[name] == pytest.approx(trained.values(f"evaluation_{name}")[-1][1], rel=1e-6)
    assert evaluated(home, *TWO_RANKS, "engine.name=ort") == pytest.approx(found, rel=1e-5)

    monkeypatch.chdir(home)
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(home / "cache"))
    samples = Data(parse_resolved((trained.folder / "recipe.yaml").read_text())).evaluation
    assert samples is not None
    batch = collate([samples.sample(i, epoch=0) for i in range(len(samples))])
    ids, labels = batch["input_ids"], batch["labels"]
    with torch.no_grad():
        plain = BertForMaskedLM.from_pretrained(trained.folder / "export").eval()(**batch)
    session = onnxruntime.InferenceSession(str(exported / "model.onnx"), providers=["CPUExecutionProvider"])
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    (by_onnx,) = session.run(None, {name: value.numpy() for name, value in given.items()})
    for logits in (plain.logits, torch.tensor(by_onnx)):
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels)
        right = (logits.argmax(-1) == labels).sum() / (labels != -100).sum()
        expected = {"loss": loss, "perplexity": loss.exp(), "masked_word_accuracy": right}
        measured = {name: found[name] for name in expected}
        assert measured == pytest.approx({name: float(value) for name, value in expected.items()}, rel=1e-5)
    assert found["samples"] == len(samples)
