"""Samples of a context with several choices; rows without the right number of them are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.recipe.fields.data import Corpus
from ortlaunch.worker.data.file_rows import DataError
from ortlaunch.worker.data.labelled.choice_texts import ChoiceTexts

pytestmark = pytest.mark.usefixtures("own_cache")


def choices(folder: Path, content: str, **settings: Any) -> ChoiceTexts:
    from transformers import BertTokenizerFast

    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcd"]))
    path = folder / f"x.{settings.get('format', 'jsonl')}"
    path.write_text(content)
    source = Corpus(path=(str(path),), **{"format": "jsonl", **settings})
    return ChoiceTexts(source, BertTokenizerFast(str(folder / "vocab.txt")), 6)


def test_choices(tmp_path: Path) -> None:
    """A sample has the context with each choice, of a list or of several columns."""
    rows = [{"context": "a", "choices": ["b", "c d"], "label": 1}]
    listed = choices(tmp_path, json.dumps(rows[0]))
    columns = {"choice_columns": ("one", "two"), "format": "csv"}
    table = choices(tmp_path, "context,one,two,label\na,b,c d,1\n", **columns)
    for samples in (listed, table):
        sample = {name: value.tolist() for name, value in samples.sample(0, 0).items()}
        assert sample == {
            "input_ids": [[2, 4, 3, 5, 3, 0], [2, 4, 3, 6, 7, 3]],
            "token_type_ids": [[0, 0, 0, 1, 1, 0], [0, 0, 0, 1, 1, 1]],
            "attention_mask": [[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]],
            "labels": 1,
        }
        assert samples.size(0) == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"choices": ["a"]}, "x.jsonl:2: context, choices have 1 choices; multiple-choice needs"),
        ({"choices": ["a", ""]}, "x.jsonl:2: .* and '' among the texts"),
        ({"choices": ["a", "b", "c"]}, "x.jsonl:2: has 3 choices, and the first row 2; all rows"),
        ({"label": 2}, "x.jsonl:2: label is 2; it must be the index .* from 0 to 1"),
        ({"label": "b"}, "x.jsonl:2: label is 'b'; it must be the index"),
    ],
)
def test_bad_choices_are_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    """A row without several choices, or whose label is none of them, is an error with its line."""
    good = {"context": "a", "choices": ["b", "c"], "label": 1}
    rows = [json.dumps(row) + "\n" for row in (good, {**good, **changes})]
    with pytest.raises(DataError, match=message):
        choices(tmp_path, "".join(rows))
