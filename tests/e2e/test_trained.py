"""`ortlaunch export --format onnx` and `ortlaunch evaluate` of a trained run."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from ortlaunch.recipe import parse_resolved_recipe
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.worker.data import LoadedData, collate
from ortlaunch.worker.export.export_checkpoint import (
    load_recipe_trained_model_and_data_of_checkpoint as checkpoint_model,
)
from tests.e2e.runs import (
    BERT,
    COMMAND,
    EAGER,
    TWO_RANKS,
    Run,
    Train,
    ended_well,
    environment,
    merged,
)
from tests.ort import needs_ort

pytestmark = [needs_ort, pytest.mark.slow]


@pytest.fixture(scope="module")
def trained(train: Train) -> Run:
    """A run of BERT with six steps of masked-word training."""
    return ended_well(train("trained", merged(BERT, {**EAGER, "train": {"max_steps": 6}})))


def ortlaunch(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [str(COMMAND), *words]
    return subprocess.run(
        command,
        cwd=home,
        env=environment(home),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def exported(trained: Run, home: Path) -> Path:
    """The folder with model.onnx."""
    done = ortlaunch(home, "export", "trained", "--format=onnx")
    assert done.returncode == 0, done.stderr
    assert "onnxruntime's outputs differ from PyTorch's by at most" in done.stdout
    return trained.folder / "exports/step_00000006_onnx"


@pytest.mark.ci
def test_an_export_is_told(trained: Run, exported: Path, home: Path) -> None:
    """exports.jsonl records the difference from PyTorch; an existing export is not overwritten."""
    assert {"model.onnx", "config.json", "tokenizer.json"} <= {
        path.name for path in exported.iterdir()
    }
    (line,) = [
        json.loads(text) for text in (trained.folder / "exports.jsonl").read_text().splitlines()
    ]
    assert (line["step"], line["onnx"]["outputs"]) == (6, ["logits"])
    assert line["onnx"]["largest_difference"] < 1e-4
    again = ortlaunch(home, "export", "trained", "--format=onnx")
    assert (again.returncode, "exists already" in again.stderr) == (2, True)


def evaluated(home: Path, *words: str) -> dict[str, Any]:
    done = ortlaunch(home, "evaluate", "trained", *words)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    path = home / "trained/evaluations/step_00000006/evaluation.json"
    assert "masked word accuracy" in done.stdout
    return dict(json.loads(path.read_text()))


@pytest.mark.ci
def test_one_number(
    trained: Run, exported: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks on ort, model.onnx and plain transformers evaluate to the same numbers."""
    from transformers import BertForMaskedLM

    found = evaluated(home)
    for name in ("loss", "perplexity", "masked_word_accuracy"):  # as training itself evaluated
        assert found[name] == pytest.approx(trained.values(f"evaluation_{name}")[-1][1], rel=1e-6)
    assert evaluated(home, *TWO_RANKS, "engine.name=ort") == pytest.approx(found, rel=1e-5)
    for model in (exported, exported / "model.onnx", trained.folder / "export"):
        done = ortlaunch(home, "evaluate", str(model), "--json")
        assert done.returncode == 0, done.stderr
        by_itself = json.loads(done.stdout)
        # A model by itself has no step.
        assert by_itself.pop("step") is None
        assert by_itself == pytest.approx({name: found[name] for name in by_itself}, rel=1e-5)

    monkeypatch.chdir(home)
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(home / "cache"))
    samples = LoadedData(
        parse_resolved_recipe((trained.folder / "recipe.yaml").read_text())
    ).evaluation
    assert samples is not None
    batch = collate([samples.sample(i, epoch=0) for i in range(len(samples))])
    with torch.no_grad():
        logits = BertForMaskedLM.from_pretrained(trained.folder / "export").eval()(**batch).logits
        labels = batch["labels"]
    right = (logits.argmax(-1) == labels).sum() / (labels != -100).sum()
    loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels)
    assert (found["loss"], found["samples"]) == (pytest.approx(float(loss), rel=1e-5), len(samples))
    assert found["masked_word_accuracy"] == pytest.approx(float(right), rel=1e-5)


def test_inductor_finds_the_same_numbers(trained: Run, home: Path) -> None:
    """An evaluation on inductor gives the numbers of one on eager."""
    found = evaluated(home)
    assert evaluated(home, "engine.name=inductor") == pytest.approx(found, rel=1e-5)


@pytest.mark.parametrize("stage", [0, 1, 2, pytest.param(3, marks=pytest.mark.ci)])
def test_an_export_of_each_stage(
    stage: int, train: Train, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exports of runs with ZeRO 0 to 3 have the logits of the checkpoint."""
    from transformers import AutoModelForMaskedLM

    sharded = merged(
        BERT,
        {
            **EAGER,
            "zero": {"stage": stage},
            "train": {"max_steps": 3, "evaluate_every_steps": None},
        },
    )
    run = ended_well(train(f"stage{stage}", sharded, *TWO_RANKS))
    # `ortlaunch export` itself compares the latter two with PyTorch.
    for form in (
        "huggingface",
        "onnx",
        "ondevice",
    ):
        done = ortlaunch(
            home, "export", run.folder.name, f"--format={form}", f"--to=stage{stage}-{form}"
        )
        assert done.returncode == 0, done.stderr
    monkeypatch.chdir(home)
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(home / "cache"))
    _, whole, _ = checkpoint_model(RunDir(run.folder), 3)
    ids = torch.arange(5, 25).reshape(2, 10)
    with torch.no_grad():
        expected = whole.model.eval()(input_ids=ids).logits
        for folder in (run.folder / "export", home / f"stage{stage}-huggingface"):
            assert torch.equal(
                AutoModelForMaskedLM.from_pretrained(folder).eval()(input_ids=ids).logits, expected
            )


def test_adapters_alone_and_merged(train: Train, home: Path) -> None:
    """Adapters on their base model have the logits of the merged export."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForMaskedLM

    adapted = {
        "lora": {"r": 4, "target_modules": ["query", "value"]},
        "pretrained": "base/export",
        "config": None,
    }
    ended_well(
        train(
            "base", merged(BERT, {**EAGER, "train": {"max_steps": 2, "evaluate_every_steps": None}})
        )
    )
    recipe = merged(
        BERT,
        {**EAGER, "zero": {"stage": 2}, "train": {"max_steps": 3, "evaluate_every_steps": None}},
    )
    ended_well(train("lora", {**recipe, "model": {"task": "masked-lm", **adapted}}, *TWO_RANKS))
    for words in (
        ("--lora=merged", "--to=merged"),
        ("--lora=alone", "--to=alone"),
        ("--format=onnx",),
    ):
        done = ortlaunch(home, "export", "lora", *words)
        assert done.returncode == 0, done.stderr
    ids = torch.arange(5, 25).reshape(2, 10)
    base = AutoModelForMaskedLM.from_pretrained(home / "base/export").eval()
    with torch.no_grad():
        # PeftModel changes the base in place, so its own logits are computed first.
        untouched = base(input_ids=ids).logits
        merged_one = (
            AutoModelForMaskedLM.from_pretrained(home / "merged").eval()(input_ids=ids).logits
        )
        alone = peft.PeftModel.from_pretrained(base, home / "alone").eval()(input_ids=ids).logits
    torch.testing.assert_close(alone, merged_one, atol=1e-5, rtol=0)
    # Otherwise the adapters had no effect.
    assert float((untouched - merged_one).abs().max()) > 1e-4

    # Adapters that continue the first ones are loaded beside them, each under its name.
    continued = merged(recipe, {"zero": {"stage": 0}, "optimizer": {"learning_rate": 1e-2}})
    lora = {**adapted, "lora": {"pretrained": "alone"}}
    ended_well(train("continued", {**continued, "model": {"task": "masked-lm", **lora}}))
    for words in (("--lora=merged", "--to=merged-2"), ("--lora=alone", "--to=alone-2")):
        assert ortlaunch(home, "export", "continued", *words).returncode == 0
    base = AutoModelForMaskedLM.from_pretrained(home / "base/export").eval()
    both: Any = peft.PeftModel.from_pretrained(base, home / "alone", adapter_name="first").eval()
    both.load_adapter(home / "alone-2", adapter_name="second")
    with torch.no_grad():
        first = both(input_ids=ids).logits
        both.set_adapter("second")
        second = both(input_ids=ids).logits
        expected = (
            AutoModelForMaskedLM.from_pretrained(home / "merged-2").eval()(input_ids=ids).logits
        )
    torch.testing.assert_close(first, merged_one, atol=1e-5, rtol=0)
    torch.testing.assert_close(second, expected, atol=1e-5, rtol=0)
    assert float((first - second).abs().max()) > 1e-4


@pytest.mark.ci
def test_a_device_goes_on(trained: Run, home: Path) -> None:
    """An on-device model is trained, averaged and exported by commands, with a lower loss."""
    for words in (
        ("export", "trained", "--format=ondevice", "--to=artifacts"),
        ("device", "train", "artifacts", "data.train.path=[train.txt]", "--steps=4", "--to=one"),
        ("device", "train", "artifacts", "--steps=2", "--to=two"),
        ("device", "evaluate", "artifacts"),
    ):
        done = ortlaunch(home, *words)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    before = json.loads((home / "artifacts/evaluation.json").read_text())
    assert before["loss"] == pytest.approx(trained.values("evaluation_loss")[-1][1], rel=1e-5)
    for words in (
        ("device", "average", "artifacts", "one", "two"),
        ("device", "evaluate", "artifacts"),
        ("device", "export", "artifacts", "--to=left"),
    ):
        done = ortlaunch(home, *words)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    after = json.loads((home / "artifacts/evaluation.json").read_text())
    assert after["loss"] < before["loss"]
    left = ortlaunch(home, "evaluate", "left", "--recipe=artifacts/recipe.yaml", "--json")
    assert json.loads(left.stdout)["loss"] == pytest.approx(after["loss"], rel=1e-5), left.stderr


def test_a_corpus_that_changed(train: Train, home: Path) -> None:
    """Export, evaluation and a resumed run keep the first tokenizer, also without the corpus."""
    (home / "moving.txt").write_text((home / "train.txt").read_text())
    corpus = {"data": {"train": {"format": "text", "path": ["moving.txt"]}, "evaluation": None}}
    recipe = merged(
        BERT, {**EAGER, **corpus, "train": {"max_steps": 2, "evaluate_every_steps": None}}
    )
    run = ended_well(train("moving", recipe))
    (home / "moving.txt").write_text(
        # A tokenizer trained on this text would contain "quite".
        "quite other words\n\n" * 40 + (home / "train.txt").read_text()
    )
    longer = merged(recipe, {"train": {"max_steps": 4}})
    ended_well(train("moving", longer, "--allow=data"))
    (home / "moving.txt").unlink()
    done = ortlaunch(home, "export", "moving", "--step=2", "--to=moved")
    assert done.returncode == 0, done.stderr
    measured = ortlaunch(
        home, "evaluate", "moving", "data.evaluation={format: text, path: [held-out.txt]}"
    )
    assert measured.returncode == 0, measured.stderr
    words = [
        (place / "tokenizer.json").read_text() for place in (run.folder / "export", home / "moved")
    ]
    assert words[0] == words[1] == (run.folder / "tokenizer/tokenizer.json").read_text()
    assert "quite" not in json.loads(words[0])["model"]["vocab"]


OWN = """
from pathlib import Path

import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.last = torch.nn.Linear(4, 1)

    def forward(self, x, y):
        return ((self.last(x) - y) ** 2).mean()


def data(count, path):
    Path(path).read_text()
    rows = torch.randn(count, 4, generator=torch.Generator().manual_seed(count))
    return [{"x": row, "y": row.sum().reshape(1)} for row in rows]
"""


@pytest.mark.ci
def test_a_custom_run_is_measured_without_its_training_data(home: Path) -> None:
    """`ortlaunch evaluate` does not need the training data, only the held-out data."""
    (home / "own_data.py").write_text(OWN)
    for name in ("seen.txt", "held.txt"):
        (home / name).write_text("")
    source = "{{format: custom, factory: 'own_data:data', arguments: {{count: {}, path: {}.txt}}}}"
    (home / "own_data.yaml").write_text(
        "name: own\nmodel: {task: custom, factory: 'own_data:Net'}\n"
        f"data: {{train: {source.format(16, 'seen')}, evaluation: {source.format(8, 'held')}}}\n"
        "batch: {micro_size: 8, accumulation_steps: 1}\noptimizer: {name: sgd, "
        "learning_rate: 0.1}\n"
        "engine: {name: eager}\ntrain: {max_steps: 2}\n"
    )
    done = ortlaunch(home, "train", "own_data.yaml", "--run-dir=own_data")
    assert done.returncode == 0, done.stderr
    (home / "seen.txt").unlink()
    done = ortlaunch(home, "evaluate", "own_data")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    found = json.loads((home / "own_data/evaluations/step_00000002/evaluation.json").read_text())
    told = json.loads((home / "own_data/summary.json").read_text())
    assert found["loss"] == pytest.approx(told["evaluation_loss"], rel=1e-6)
