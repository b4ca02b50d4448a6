"""Test `ortlaunch import`: data sets of LLaMA-Factory's dataset_info.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from ortlaunch.base.errors import InputError, RecipeError
from ortlaunch.importers import ImportedRecipe, convert_config_to_recipe
from tests.control.foreign import said

INFO = {
    "alpaca": {"file_name": "alpaca.json"},
    "history": {
        "hf_hub_url": "org/set",
        "subset": "en",
        "columns": {"prompt": "ask", "response": "say", "history": "past", "query": ""},
    },
    "talks": {
        "file_name": "talks.jsonl",
        "formatting": "sharegpt",
        "num_samples": 50,
        "columns": {"messages": "turns", "system": "rule", "tools": "fns"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user"},
    },
    "pages": {"file_name": "pages.jsonl", "columns": {"prompt": "text"}},
    "pairs": {"file_name": "pairs.json", "ranking": True},
    "folder": {"file_name": "folder"},
}
ALPACA = {
    "format": "jsonl",
    "prompt_column": "instruction",
    "input_column": "input",
    "response_column": "output",
}


def imported(
    folder: Path, monkeypatch: pytest.MonkeyPatch, info: str = "", **keys: Any
) -> ImportedRecipe:
    """Return the import of a config in a folder beside `data`, as LLaMA-Factory's examples are."""
    (folder / "data").mkdir()
    (folder / "data" / "dataset_info.json").write_text(info or json.dumps(INFO))
    (folder / "examples").mkdir()
    path = folder / "examples" / "sft.yaml"
    words = {"model_name_or_path": "here", "stage": "sft", "finetuning_type": "full", **keys}
    path.write_text(yaml.safe_dump(words))
    monkeypatch.chdir(folder)
    return convert_config_to_recipe(Path("examples/sft.yaml"), None, None, ())


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"dataset": "alpaca"}, {**ALPACA, "path": "data/alpaca.json"}),
        (
            {"dataset": "alpaca", "max_samples": 9},
            {**ALPACA, "path": "data/alpaca.json", "most_rows": 9},
        ),
        (
            {"dataset": "alpaca", "mask_history": True},
            {**ALPACA, "path": "data/alpaca.json", "train_on": "last"},
        ),
        (
            {"dataset": "talks", "max_samples": 99},
            {
                "format": "jsonl",
                "path": "data/talks.jsonl",
                "messages_column": "turns",
                "system_column": "rule",
                "tools_column": "fns",
                "role_key": "role",
                "content_key": "content",
                "roles": {"gpt": "assistant", "observation": "tool", "function_call": "assistant"},
                "most_rows": 50,
            },
        ),
        (
            {"dataset": "pages", "stage": "pt"},
            {"format": "jsonl", "path": "data/pages.jsonl", "text_column": "text"},
        ),
    ],
)
def test_a_data_set(
    keys: dict[str, Any],
    expected: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """File, columns, keys of messages, roles and the number of rows become those of data.train."""
    found = imported(tmp_path, monkeypatch, **keys)
    assert yaml.safe_load(found.recipe_yaml)["data"]["train"] == expected
    assert not found.import_report.dropped


def test_several_data_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are a mixture by size; one for evaluation, and a share of the data, are taken too."""
    found = imported(tmp_path, monkeypatch, dataset="alpaca, history, pairs, lost", val_size=0.1)
    data = yaml.safe_load(found.recipe_yaml)["data"]
    assert [part["weight"] for part in data["train"]] == [None, None]
    assert data["train"][1]["source"] == {
        "format": "hub",
        "name": "org/set",
        "subset": "en",
        "prompt_column": "ask",
        "response_column": "say",
    }
    assert data["evaluation"] == {"share": 0.1}
    dropped = said(found, "dropped")
    assert dropped.keys() == {
        "dataset history.columns.history",
        "dataset pairs",
        "dataset lost",
    }
    assert "preferences" in dropped["dataset pairs"]
    assert dropped["dataset lost"].startswith("data/dataset_info.json has no lost")


def test_evaluation_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """eval_dataset is data.evaluation, and eval_steps counts its evaluations."""
    found = imported(
        tmp_path, monkeypatch, dataset="alpaca", eval_dataset="talks", dataset_dir="data",
        eval_strategy="steps", eval_steps=7, template="qwen",
    )  # fmt: skip
    made = yaml.safe_load(found.recipe_yaml)
    assert made["data"]["evaluation"]["path"] == "data/talks.jsonl"
    assert made["train"]["evaluate_every_steps"] == 7
    assert not found.import_report.dropped
    assert said(found, "changed").keys() == {"template"}


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"dataset": "folder"}, "its file 'folder' is none of .json, .jsonl, .csv, .txt, .parquet"),
        ({"dataset": "alpaca", "dataset_dir": "other"}, "no dataset_info.json is in the folder"),
    ],
)
def test_data_that_cannot_be_taken(
    keys: dict[str, Any], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error for the missing data.train has the reason."""
    with pytest.raises(RecipeError, match=text):
        imported(tmp_path, monkeypatch, **keys)


def test_a_damaged_description(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dataset_info.json that is not JSON is an error with its place, and not an absent file."""
    with pytest.raises(InputError, match=r"data/dataset_info.json:2:14: is not JSON"):
        imported(tmp_path, monkeypatch, '{\n  "alpaca": {,}\n}', dataset="alpaca")
    path = tmp_path / "data" / "dataset_info.json"
    path.write_bytes(b'{"caf\xe9": {}}')
    with pytest.raises(InputError, match=r"dataset_info.json: is not UTF-8: .* at byte 5"):
        convert_config_to_recipe(Path("examples/sft.yaml"), None, None, ())


def test_thoughts_are_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`enable_thinking` becomes a variable of the chat template, also when it is false."""
    found = imported(tmp_path, monkeypatch, dataset="talks", enable_thinking=False)
    data = yaml.safe_load(found.recipe_yaml)["data"]
    assert data["template_arguments"] == {"enable_thinking": False}
    assert "that names it" in said(found, "changed")["enable_thinking"]
