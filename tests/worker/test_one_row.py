"""A metric, or a model task, needs one row in a table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from ortlaunch.launch_plan import Plan
from ortlaunch.recipe import Recipe
from ortlaunch.run_folder.folder import read_json_or_raise_damaged
from ortlaunch.run_folder.reference import run_folder_manual_page_markdown
from ortlaunch.tables.metrics import METRICS, BuiltInMetric, Measure
from ortlaunch.tables.model_tasks import MODEL_TASKS, ModelTask
from tests.makers import BERT, bert
from tests.training import run_here

SMALL = {
    **BERT,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}


class LabelCount:
    """A metric that counts the evaluated labels."""

    def __init__(self, model: Any) -> None:
        self.count = 0.0

    def count_micro_batch(self, output: Any, labels: Mapping[str, Any], counts: bool) -> None:
        # -100 marks positions without a label.
        self.count += float((labels["labels"] != -100).sum()) if counts else 0.0

    def metrics_over_ranks(self, group: Any, loss: float) -> dict[str, float]:
        return {"label_count": sum(count for (count,) in group.gather_numbers([self.count]))}


FAKE = BuiltInMetric(
    "How many labels there were.",
    "max",
    "labels {:.0f}",
    {"masked-lm": Measure(f"{__name__}:LabelCount", False)},
)


def small(tmp_path: Path, task: str = "masked-lm", **sections: Any) -> Recipe:
    """Return a recipe of three steps of a tiny BERT on short texts."""
    text = tmp_path / "words.txt"
    text.write_text("\n\n".join(f"the cat {i} saw a dog {i % 3} times" for i in range(40)))
    corpus = {"format": "text", "path": [str(text)]}
    data = {
        "train": corpus,
        "evaluation": corpus,
        "tokenizer": {"train": "wordpiece", "vocab_size": 400},
    }
    return bert(
        model={"task": task, "config": SMALL},
        data={**data, "sequence_length": 16},
        train={"max_steps": 3, "evaluate_every_steps": 1},
        **sections,
    )


def test_a_metric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row of METRICS is in metrics.jsonl, the log, evaluation.json, the docs and keep_best."""
    assert "label_count" not in run_folder_manual_page_markdown()
    monkeypatch.setitem(METRICS, "label_count", FAKE)
    recipe = small(tmp_path, checkpoint={"keep_best": {"metric": "label_count"}})
    run = run_here(tmp_path / "run", recipe)
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    (count,) = {line["evaluation_label_count"] for line in lines if "evaluation_loss" in line}
    assert count > 0
    assert f"labels {count:.0f}" in capsys.readouterr().out
    best = read_json_or_raise_damaged(run.summary)["best"]
    # The count is the same in every evaluation, and only a larger one would be better.
    assert (best["metric"], best["value"], best["step"]) == ("label_count", count, 1)
    run_here(run.path, recipe, "evaluate")
    assert read_json_or_raise_damaged(run.evaluation)["label_count"] == count
    assert (
        "| `label_count` | number or absent | How many labels there were. Of masked-lm. Best: max. |"
        in run_folder_manual_page_markdown()
    )


def test_a_model_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of MODEL_TASKS is accepted in recipes, and its data and model are built and trained."""
    # Without the row, the name is unknown.
    with pytest.raises(ValidationError, match=r"Input should be 'pretraining', .* or 'lightning'"):
        small(tmp_path, "cloze")
    monkeypatch.setitem(MODEL_TASKS, "cloze", ModelTask("AutoModelForMaskedLM", predicts="masked"))
    run = run_here(tmp_path / "run", small(tmp_path, "cloze"))
    assert read_json_or_raise_damaged(run.summary)["steps"] == 3
    assert read_json_or_raise_damaged(run.export / "config.json")["architectures"] == [
        "BertForMaskedLM"
    ]
    assert Plan.read(run.plan).memory is not None
