"""`ortlaunch data prepare`: a training uses its cache, and it reports the same errors."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.recipe import dump_recipe_yaml
from ortlaunch.worker import single_process
from ortlaunch.worker.data import LoadedData, tokenizer
from ortlaunch.worker.data import token_cache as tokens
from ortlaunch.worker.data.identity import data_identity_record
from tests.makers import BERT, bert

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that prepares a recipe of a JSON Lines text; returns recipe and exit status."""
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path / "cache"))

    def run(content: str, **changes: Any) -> tuple[Any, int]:
        path = tmp_path / "a.jsonl"
        path.write_text(content)
        data = {"train": {"format": "jsonl", "path": [str(path)]}, "sequence_length": 8}
        made = bert(
            data={**data, "tokenizer": {"train": "wordpiece", "vocab_size": 300}}, **changes
        )
        request = io.StringIO(json.dumps({"recipe": dump_recipe_yaml(made)}))
        monkeypatch.setattr("sys.stdin", request)
        monkeypatch.setattr("sys.argv", ["", "prepare data"])
        # It would tie the test process to its parent.
        monkeypatch.setattr(
            single_process, "request_signal_at_parent_end_or_exit_if_ended", lambda *_: None
        )
        monkeypatch.setenv("DS_ACCELERATOR", "cpu")
        return made, single_process.set_up_cpu_process_and_run_task_of_stdin_request()

    return run


def test_a_training_finds_it_all_there(
    prepare: Any, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training after the preparation tokenizes nothing again."""
    made, status = prepare('{"text": "the cat sat on the mat"}\n' * 20)
    assert status == 0
    # Samples of 6 words between [CLS] and [SEP].
    assert "data.train: 20 samples\nready in " in capsys.readouterr().out
    # A call of it would fail.
    monkeypatch.setattr(tokens, "_write_missing_tokens_and_list_files", None)
    assert len(LoadedData(made).train) == 20


def test_so_it_does_of_rows_with_labels(
    prepare: Any, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training reads no labelled row again, not even for the identity of the data."""
    model = {"task": "sequence-classification", "config": BERT}
    made, status = prepare(
        '{"text": "the cat", "label": 0}\n{"text": "the mat", "label": 2}\n', model=model
    )
    assert status == 0
    assert (
        "data.train: 2 samples\nclasses: 3\n"
        "classes: no training row has class 1; check data.train's labels\n"
        "classes: a single training row has class 0, 2; check data.train's labels\nready in "
    ) in capsys.readouterr().out
    monkeypatch.setattr(tokens, "_write_missing_tokens_and_list_files", None)
    found = LoadedData(made).train
    assert (len(found), int(found.sample(1, 0)["labels"])) == (2, 2)
    assert data_identity_record(found)["fingerprint"]


def test_a_full_cache_is_told(
    prepare: Any, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk is an error in one line with advice."""

    # The library that writes the tokenizer names no file.
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tokenizer, "_train_save_and_list_tokenizer_files", full)
    assert prepare('{"text": "the cat sat"}\n' * 20)[1] == 1
    said = capsys.readouterr().err
    assert (
        "No space left on device; free some space; ORTLAUNCH_CACHE can name another folder" in said
    )


def test_what_is_wrong_is_told(prepare: Any, capsys: Captured) -> None:
    """Wrong data end with file and line, and with status 2."""
    assert prepare('{"text": "a"}\n{"text": }\n')[1] == 2
    assert "a.jsonl:2:10: is no JSON" in capsys.readouterr().err
