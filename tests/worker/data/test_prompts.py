"""Prompts, named chat templates, special tokens, and what of a chat counts in the loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortlaunch.base.errors import InputError
from ortlaunch.recipe.fields.data import Data
from ortlaunch.recipe.fields.prompts import CHAT_TEMPLATES
from ortlaunch.worker.data.chats.samples import ANSWER, load_or_tokenize_chats_marking_trained_text
from ortlaunch.worker.data.file_rows import DataError
from ortlaunch.worker.data.tokenizer import load_tokenizer_with_added_tokens_or_none
from tests.worker.data.test_chats import CHATML, TURNS, cache, corpus, marked, plain, tokenizer_of

__all__ = ["cache"]
ROWS = [
    {"instruction": "What is a dog?", "input": "", "output": "It barks."},
    {"instruction": "Be brief.", "input": "the dog", "output": "A näïve animal.</s>"},
]
OWN = {
    "template": "{system}Q: {instruction} {input}\nA:\n",
    "without_input": "Q: {instruction}\nA:\n",
}
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\nWhat is a dog?\n\n### Response:\n"
)


def learned(source: Any, tokenizer: Any) -> list[tuple[str, str]]:
    """Return the text of each chat, and the part of it that counts in the loss."""
    documents = load_or_tokenize_chats_marking_trained_text(source, tokenizer, print)
    found = []
    for ids in np.split(documents.tokens[:], documents.ends[:-1]):
        counted = [int(each & (ANSWER - 1)) for each in ids if each >= ANSWER]
        found.append((tokenizer.decode((ids & (ANSWER - 1)).tolist()), tokenizer.decode(counted)))
    return found


def test_prompts_are_text(tmp_path: Path) -> None:
    """A row becomes its format's text, with an end mark; the loss counts the response and it."""
    tokenizer = tokenizer_of("byte-level", None)
    (first, second) = learned(corpus(tmp_path, *ROWS, prompt="alpaca"), tokenizer)
    assert first == (f"{ALPACA}It barks.</s>", "It barks.</s>")
    # An end mark in the row is not doubled.
    assert second[0].endswith("### Input:\nthe dog\n\n### Response:\nA näïve animal.</s>")
    rows = [{**row, "rule": "S "} for row in ROWS]
    own = corpus(tmp_path, *rows, prompt=OWN, input_column="input", system_column="rule")
    assert [text for text, _ in learned(own, tokenizer)] == [
        "Q: What is a dog?\nA:\nIt barks.</s>",
        "S Q: Be brief. the dog\nA:\nA näïve animal.</s>",
    ]
    tokenizer.eos_token = None
    with pytest.raises(DataError, match=r"no eos_token.*data\.special_tokens\.eos_token"):
        learned(own, tokenizer)


@pytest.mark.parametrize("form", [marked, plain], ids=["marked", "compared"])
def test_what_counts_in_the_loss(form: Any, tmp_path: Path) -> None:
    """All answers, the last one, chosen ones or the whole text count, with their end marks or not."""
    tokenizer = tokenizer_of("byte-level", form(CHATML))
    answers = [TURNS[2]["content"], "A"]
    chosen = [*TURNS[:2], {**TURNS[2], "weight": 0}, TURNS[3], {**TURNS[4], "weight": 1}]

    def of(**fields: Any) -> str:
        unread = () if "train_key" in fields else ("weight",)
        source = corpus(
            tmp_path, chosen, messages_column="messages", ignore_fields=unread, **fields
        )
        ((text, counted),) = learned(source, tokenizer)
        return "all" if text == counted else counted

    assert of() == "".join(f"{each}<|im_end|>" for each in answers)
    assert of(train_on="last") == "A<|im_end|>"
    assert of(train_key="weight") == "A<|im_end|>"
    assert of(train_on_end=False) == "".join(answers)
    assert of(train_on="all") == "all"


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({**TURNS[2], "weight": "yes"}, "message 2 of messages: weight is 'yes'; it must be true or"),
        ({"role": "user", "content": "a", "weight": True}, "message 2 of messages: weight is True in a"),
    ],
)  # fmt: skip
def test_wrong_choices_are_named(message: Any, error: str, tmp_path: Path) -> None:
    """A value that is no choice, and a choice of a message that is no answer, are refused."""
    rows = [TURNS[1], message, TURNS[4]]
    source = corpus(tmp_path, rows, messages_column="messages", train_key="weight")
    with pytest.raises(DataError, match=f"chats.jsonl:1: {error}"):
        learned(source, tokenizer_of("byte-level", plain(CHATML)))


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_named_chat_templates(name: str, tmp_path: Path) -> None:
    """Each named template writes a chat whose answers are found, after a system message or not."""
    tokenizer = tokenizer_of("byte-level", CHAT_TEMPLATES[name])
    marks = ["<|im_end|>", "<end_of_turn>", "<|eot_id|>", "<|end|>"]
    tokenizer.add_tokens(marks, special_tokens=True)
    for text, counted in learned(corpus(tmp_path, TURNS, TURNS[1:]), tokenizer):
        answers = counted
        for mark in (*marks, "</s>"):
            answers = answers.replace(mark, "|")
        assert [each.strip() for each in answers.split("|")] == [
            TURNS[2]["content"].strip(),
            "A",
            "",
        ]
        assert all(turn["content"].strip() in text for turn in TURNS[1:])


def test_special_tokens(tmp_path: Path) -> None:
    """Special tokens replace the tokenizer's, and new ones join its vocabulary."""
    tokenizer_of("byte-level", None).save_pretrained(tmp_path)
    size = len(tokenizer_of("byte-level", None))
    fields = {"train": "python-docs", "tokenizer": str(tmp_path), "sequence_length": 8}
    chosen = {"special_tokens": {"eos_token": "<|im_end|>", "pad_token": "<pad>"}}
    data = Data(**fields, **chosen, added_tokens=("<|a|>",), chat_template="chatml")
    tokenizer = load_tokenizer_with_added_tokens_or_none(data)
    assert (tokenizer.eos_token, tokenizer.pad_token_id) == ("<|im_end|>", size)
    assert tokenizer("<|a|>", add_special_tokens=False)["input_ids"] == [size + 1]
    assert tokenizer.chat_template == CHAT_TEMPLATES["chatml"]
    with pytest.raises(InputError, match=r"data.chat_template: cannot read lama3"):
        load_tokenizer_with_added_tokens_or_none(Data(**fields, chat_template="lama3"))
