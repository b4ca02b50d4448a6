"""Windows of contexts with their answers; rows whose answer is not where they say are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.recipe.fields.data import Corpus
from ortlaunch.worker.data.file_rows import DataError
from ortlaunch.worker.data.labelled.answer_windows import AnswerWindows

pytestmark = pytest.mark.usefixtures("own_cache")
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefgh"]


def windows(folder: Path, *rows: dict[str, Any], **settings: Any) -> AnswerWindows:
    from transformers import BertTokenizerFast

    (folder / "vocab.txt").write_text("\n".join(WORDS))
    (folder / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = Corpus(format="jsonl", path=(str(folder / "x.jsonl"),))
    tokenizer = BertTokenizerFast(str(folder / "vocab.txt"))
    return AnswerWindows(source, tokenizer, 8, **settings)


def row(answer: str, start: int, context: str = "b c d e f g", **more: Any) -> dict[str, Any]:
    answers = {"text": [answer], "answer_start": [start]}
    return {"question": " a", "context": context, "answers": answers, **more}


def test_windows(tmp_path: Path) -> None:
    """A long context gives windows that overlap; without the whole answer they point at [CLS]."""
    samples = windows(tmp_path, row("g", 10), row("c d", 2), row("c", 2, "b c"), stride=2)
    words = [[WORDS[i] for i in samples.sample(n, 0)["input_ids"]] for n in range(len(samples))]
    assert words == [
        ["[CLS]", "a", "[SEP]", "b", "c", "d", "e", "[SEP]"],
        ["[CLS]", "a", "[SEP]", "d", "e", "f", "g", "[SEP]"],
        ["[CLS]", "a", "[SEP]", "b", "c", "d", "e", "[SEP]"],
        ["[CLS]", "a", "[SEP]", "d", "e", "f", "g", "[SEP]"],
        ["[CLS]", "a", "[SEP]", "b", "c", "[SEP]", "[PAD]", "[PAD]"],
    ]
    names = ("start_positions", "end_positions")
    spans = [tuple(int(samples.sample(n, 0)[name]) for name in names) for n in range(5)]
    # An answer at the end of a window stays there: run_qa.py would go on into the padding.
    assert spans == [(0, 0), (6, 6), (4, 5), (0, 0), (4, 4)]
    assert samples.sample(4, 0)["token_type_ids"].tolist() == [0, 0, 0, 1, 1, 1, 0, 0]
    assert [samples.row_of_window(n) for n in range(5)] == [0, 0, 1, 1, 2]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (row("d", 0), "x.jsonl:2: the answer 'd' is not at answer_start 0 of context, which has "
                      "'b' there; it is at 4"),
        (row("h", 0), "x.jsonl:2: the answer 'h' .*; the context does not contain it"),
        (row("b", 0, answers={"text": "b"}), r"x.jsonl:2: answers is {'text': 'b'}; it must be "),
        (row("b", 0, answers={"text": ["b"], "answer_start": []}), "x.jsonl:2: answers is "),
        (row("b", 0, answers=None), "x.jsonl:2: answers is None"),
        (row("b", 0, question=" "), "x.jsonl:2: question is ' '; it must be text"),
        (row("b", 0, question="a b c"), "x.jsonl:2: the question has 3 tokens, so that a sample of "
                                        "8 has 2 for its context, .* data.stride: 2; shorten"),
    ],
)  # fmt: skip
def test_bad_questions_are_named(bad: dict[str, Any], message: str, tmp_path: Path) -> None:
    """An answer that is not in its context, or a question without room for it, names its row."""
    with pytest.raises(DataError, match=message):
        windows(tmp_path, row("b", 0), bad)
