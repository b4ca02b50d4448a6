"""Test `ortlaunch import`: Trainer's intervals of logs, evaluations and saves.

Also the best checkpoint and early stopping, which depend on evaluations.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from ortlaunch.importers import convert_config_to_recipe
from tests.control.foreign import config, said

HELD_OUT = {"validation_file": "b.txt"}
STEPS = {**HELD_OUT, "eval_strategy": "steps", "eval_steps": 9}
# A classification config; `config` leaves out keys whose value is "absent".
LABELS = {"block_size": "absent", "max_seq_length": 64, "task_name": "sst2",
          "train_file": "a.jsonl", **STEPS, "validation_file": "b.jsonl"}  # fmt: skip


def made(folder: Path, **keys: Any) -> dict[str, dict[str, Any]]:
    """Return the recipe of a config with these keys."""
    found: dict[str, dict[str, Any]] = yaml.safe_load(
        convert_config_to_recipe(config(folder, **keys), None, None, ()).recipe_yaml
    )
    return found


@pytest.mark.parametrize("key", ["load_best_model_at_end", "early_stopping_patience"])
def test_the_best_without_evaluations(key: str, tmp_path: Path) -> None:
    """Keys that need evaluations are reported as dropped where there are none before the end."""
    path = config(tmp_path, **HELD_OUT, eval_strategy="no", **{key: 3})
    text = said(convert_config_to_recipe(path, "hf-trainer", None, ()), "dropped")[key]
    assert "there is no train.evaluate_every_steps or evaluate_every_epochs" in text


def test_an_evaluation_and_a_save_each_epoch(tmp_path: Path) -> None:
    """The strategy `epoch` is an interval of one epoch, of which the best is kept."""
    keys = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    path = config(tmp_path, **HELD_OUT, eval_steps=7, save_steps=7, **keys)
    found = convert_config_to_recipe(path, "hf-trainer", None, ())
    recipe = yaml.safe_load(found.recipe_yaml)
    assert recipe["train"]["evaluate_every_epochs"] == 1
    assert recipe["checkpoint"] == {
        "every_epochs": 1,
        "keep_best": {"metric": "loss", "export": True},
    }
    assert said(found, "needless").keys() >= {"eval_steps", "save_steps"}
    assert not found.import_report.dropped


AXOLOTL = {"base_model": "here", "datasets": [{"path": "a.txt", "type": "completion"}],
           "sequence_len": 64, "micro_batch_size": 2, "learning_rate": 0.1,
           "num_epochs": 2}  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "evaluation", "evaluated", "saved"),
    [
        ({"val_set_size": 0.05}, {"share": 0.05}, 1, 1),
        ({"val_set_size": 500, "evals_per_epoch": 4}, {"samples": 500}, 0.25, 1),
        ({"val_set_size": 0.1, "saves_per_epoch": 3}, {"share": 0.1}, 1, 1 / 3),
        ({"val_set_size": 0.1, "eval_steps": 0.1, "save_steps": 0.25}, {"share": 0.1}, 0.2, 0.5),
        ({"val_set_size": 0, "saves_per_epoch": 0}, None, None, 1),
        ({"val_set_size": 0.0, "evals_per_epoch": 4}, None, None, 1),
    ],
)
def test_axolotls_intervals(
    keys: dict[str, Any],
    evaluation: dict[str, float] | None,
    evaluated: float | None,
    saved: float,
    tmp_path: Path,
) -> None:
    """Axolotl counts in times an epoch, or else evaluates and saves at the end of each."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**AXOLOTL, **keys}))
    found = convert_config_to_recipe(path, "axolotl", None, ())
    made = yaml.safe_load(found.recipe_yaml)
    assert made["data"].get("evaluation") == evaluation
    assert made["train"].get("evaluate_every_epochs") == evaluated
    assert made["checkpoint"]["every_epochs"] == saved
    assert not found.import_report.dropped
    unused = keys.keys() & {"evals_per_epoch"} if evaluation is None else set()
    assert said(found, "needless").keys() >= unused


def test_an_interval_replaces_that_of_the_base(tmp_path: Path) -> None:
    """An interval in epochs of the config takes the place of one in steps of --base."""
    base = tmp_path / "base.yaml"
    base.write_text(
        "data: {evaluation: {format: text, path: b.txt}}\n"
        "train: {evaluate_every_steps: 9}\ncheckpoint: {every_steps: 9}\n"
    )
    keys = {"eval_strategy": "epoch", "save_strategy": "epoch", "validation_split_percentage": 5}
    made = yaml.safe_load(
        convert_config_to_recipe(config(tmp_path, **keys), None, base, ()).recipe_yaml
    )
    assert made["train"]["evaluate_every_epochs"] == made["checkpoint"]["every_epochs"] == 1
    assert made["data"]["evaluation"] == {"share": 0.05}
    assert not {"evaluate_every_steps", "every_steps"} & {*made["train"], *made["checkpoint"]}


@pytest.mark.parametrize(
    ("keys", "section", "expected"),
    [
        # 9.5 steps, rounded up.
        ({**HELD_OUT, "eval_steps": 0.1, "max_steps": 95}, "train", 10),
        ({**HELD_OUT, "eval_steps": 200.0}, "train", 200),
        ({**HELD_OUT, "eval_steps": 0.1}, "train", 0.3),
        # Trainer then evaluates every logging_steps, whose default is 500.
        ({**HELD_OUT, "eval_strategy": "steps"}, "train", 500),
        ({**HELD_OUT, "eval_strategy": "steps", "logging_steps": 20}, "train", 20),
        ({**HELD_OUT, "eval_strategy": "no", "eval_steps": 20}, "train", None),
        ({"save_steps": 0.25, "max_steps": 100}, "checkpoint", 25),
        ({"save_steps": 0.25, "num_train_epochs": 2}, "checkpoint", 0.5),
        ({"save_strategy": "steps", "save_steps": 40}, "checkpoint", 40),
        ({"logging_steps": 0.05, "max_steps": 100}, "log", 5),
        ({"logging_steps": 0.05}, "log", None),
    ],
)
def test_intervals(
    keys: dict[str, Any], section: str, expected: float | None, tmp_path: Path
) -> None:
    """An interval below 1 is a share of max_steps, as in Trainer, or else of the epochs.

    Every key of the config is in the report.
    """
    found = convert_config_to_recipe(config(tmp_path, **keys), "hf-trainer", None, ())
    unit = "epochs" if expected is not None and expected < 1 else "steps"
    name = f"{'evaluate_' if section == 'train' else ''}every_{unit}"
    assert yaml.safe_load(found.recipe_yaml).get(section, {}).get(name) == expected
    told = {
        key for where in ("taken", "changed", "dropped", "needless") for key in said(found, where)
    }
    assert keys.keys() <= told


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (STEPS, "loss"),
        ({**STEPS, "metric_for_best_model": "eval_loss"}, "loss"),
        ({**STEPS, "metric_for_best_model": "perplexity"}, "perplexity"),
        ({**LABELS, "metric_for_best_model": "accuracy"}, "classification_accuracy"),
        ({**LABELS, "metric_for_best_model": "eval_accuracy"}, "classification_accuracy"),
        ({**LABELS, "metric_for_best_model": "eval_f1"}, "f1_macro"),
        ({**LABELS, "task_name": "ner", "metric_for_best_model": "f1"}, "entity_f1"),
        ({**LABELS, "task_name": "stsb", "metric_for_best_model": "pearson"}, "pearson"),
        ({**STEPS, "mlm_probability": 0.15, "block_size": "absent", "max_seq_length": 64,
          "metric_for_best_model": "accuracy"}, "masked_word_accuracy"),
    ],
)  # fmt: skip
def test_the_best_by_a_metric(keys: dict[str, Any], expected: str, tmp_path: Path) -> None:
    """Trainer's metric, with or without the prefix eval_, becomes the task's own metric."""
    found = made(tmp_path, load_best_model_at_end=True, early_stopping_patience=3, **keys)
    assert found["checkpoint"]["keep_best"] == {"metric": expected, "export": True}
    assert found["train"]["stop_after"] == {"metric": expected, "evaluations": 3}


@pytest.mark.parametrize("metric", ["eval_bleu", "eval_accuracy"])
def test_a_metric_that_the_task_has_not(metric: str, tmp_path: Path) -> None:
    """A metric that the task lacks is dropped; the report names the available metrics."""
    path = config(tmp_path, **STEPS, load_best_model_at_end=True, metric_for_best_model=metric)
    dropped = said(convert_config_to_recipe(path, "hf-trainer", None, ()), "dropped")
    assert dropped["load_best_model_at_end"].endswith(
        f"no metric is called {metric}; there are loss, perplexity"
    )
    assert "metric_for_best_model" in dropped


@pytest.mark.parametrize("way", ["command", "base"])
def test_evaluation_data_beside_the_config(way: str, tmp_path: Path) -> None:
    """With evaluation data of the command line or of --base, the config's evaluations are kept.

    The same holds for its best checkpoint.
    """
    keys: dict[str, Any] = {**LABELS, "validation_file": "absent", "load_best_model_at_end": True}
    path = config(tmp_path, **keys, metric_for_best_model="accuracy")
    base = tmp_path / "base.yaml"
    base.write_text("data: {evaluation: {format: jsonl, path: b.jsonl}}\n")
    typed = ("data.evaluation={format: jsonl, path: b.jsonl}",)
    found = convert_config_to_recipe(
        path, None, *((None, typed) if way == "command" else (base, ()))
    )
    made = yaml.safe_load(found.recipe_yaml)
    assert made["train"]["evaluate_every_steps"] == 9
    assert made["checkpoint"]["keep_best"] == {"metric": "classification_accuracy", "export": True}
    assert said(found, "dropped").keys() == {"task_name"}


def test_settings_of_the_example_scripts(tmp_path: Path) -> None:
    """run_summarization's and run_qa's own keys become the fields of their tasks."""
    keys = {"block_size": "absent", "train_file": "a.csv", "validation_file": "b.csv"}
    summary = {
        "text_column": "article", "summary_column": "highlights", "source_prefix": "summarize: ",
        "max_source_length": 512, "max_target_length": 64, "predict_with_generate": True,
        "num_beams": 4,
    }  # fmt: skip
    recipe = made(tmp_path, **keys, **summary)
    assert recipe["model"]["task"] == "seq2seq"
    columns = {
        "text_column": "article", "target_column": "highlights", "source_prefix": "summarize: "
    }  # fmt: skip
    for part in ("train", "evaluation"):
        assert columns.items() <= recipe["data"][part].items()
    lengths = {"sequence_length": 512, "target_length": 64, "cut_long": True}
    assert lengths.items() <= recipe["data"].items()
    assert recipe["train"]["generate"] == {"max_new_tokens": 64, "beams": 4}
    questions = {
        "doc_stride": 128,
        "max_seq_length": 384,
        "n_best_size": 20,
        "max_answer_length": 9,
    }
    path = config(
        tmp_path, **{**keys, "train_file": "a.json", "validation_file": "b.json"}, **questions
    )
    found = convert_config_to_recipe(path, "hf-trainer", None, ())
    recipe = yaml.safe_load(found.recipe_yaml)
    assert (recipe["model"]["task"], recipe["data"]["stride"]) == ("question-answering", 128)
    assert said(found, "dropped")["max_answer_length"] == "it is 30 here"
    assert "n_best_size" in said(found, "needless")
