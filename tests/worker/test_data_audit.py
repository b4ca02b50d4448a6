"""The audit of data: each planted fault is named, and sound data have no finding."""

from __future__ import annotations

import functools
import io
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import ortlaunch
from ortlaunch.base.errors import RunError
from ortlaunch.recipe import Recipe, dump_recipe_yaml
from ortlaunch.recipe.fields.data import Data
from ortlaunch.tables import tasks
from ortlaunch.tables.tasks import ShowDataRequest
from ortlaunch.worker import single_process
from ortlaunch.worker.data import LoadedData
from ortlaunch.worker.data.file_rows import DataError
from ortlaunch.worker.data_audit import (
    audit_training_and_evaluation_samples,
    refuse_severe_findings_not_allowed,
)
from ortlaunch.worker.tasks import show_data
from tests.makers import CUSTOM, bert
from tests.worker.data.test_chats import cache

__all__ = ["cache"]
WORDS = [
    first + second
    for first in ("ba", "ko", "ri", "tu", "me", "sa", "no", "li", "ge", "du")
    for second in ("ran", "lek", "mos", "vit", "dup")
]
# Has all letters, which the tokenizer needs for the names of roles.
FOX = "the quick brown fox jumps over the lazy dog"
MARKS = ["<|im_start|>", "<|im_end|>"]
# The tokenizer does not know these.
FOREIGN = [*map(chr, range(0x4E00, 0x5E00))]
RANDOM = random.Random(0)


def text(count: int = 12) -> str:
    """Return random words."""
    return " ".join(RANDOM.choices(WORDS, k=count))


def chat(answer: str | None = None, system: str = FOX, ask: str = "") -> dict[str, Any]:
    """Return a chat; its texts are random words by default."""
    said = text() if answer is None else answer
    roles = {"system": system, "user": ask or text(), "assistant": said}
    return {
        "messages": [
            {"role": role, "content": own} for role, own in roles.items() if own or role != "system"
        ]
    }


CHATS = [chat() for _ in range(100)]
OTHERS = [chat() for _ in range(8)]
LABELLED = [{"text": text(), "label": label} for label in ("torch", "optimum") for _ in range(30)]


def made(
    folder: Path, train: list[Any], evaluation: list[Any] | None = None, **data: Any
) -> Recipe:
    """Return a recipe of these rows: chats, or texts with a class."""
    sources = {}
    for key, rows in (("train", train), ("evaluation", evaluation)):
        if rows is not None:
            path = folder / f"{key}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            columns = {"messages_column": "messages"} if "messages" in rows[0] else {}
            sources[key] = {"format": "jsonl", "path": [str(path)], **columns}
    chats = "messages" in train[0]
    template = {"chat_template": "chatml", "added_tokens": MARKS} if chats else {}
    task = "causal-lm" if chats else "sequence-classification"
    config = {"model_type": "gpt2", "n_layer": 1, "n_head": 1, "n_embd": 8}
    return bert(
        model={"task": task, **({"config": config} if chats else {})},
        data={
            "tokenizer": tokenizer_here(),
            "sequence_length": 128,
            **template,
            **sources,
            **data,
        },
    )


@functools.cache
def tokenizer_here() -> str:
    """Return the folder of a tokenizer of the usual words, for all tests."""
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    usual = ["[UNK]", "[PAD]"]
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=usual)
    backend.train_from_iterator([FOX, "extra", *WORDS], trainer)
    backend.decoder = decoders.WordPiece()
    folder = tempfile.mkdtemp()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=usual[0], pad_token=usual[1])
    fast.save_pretrained(folder)
    return folder


def names(recipe: Recipe) -> set[str]:
    """Return the names of all findings."""
    parts = audit_training_and_evaluation_samples(LoadedData(recipe))
    return {finding.name for part in parts for finding in part.findings}


LONG = [chat(text(60)) for _ in range(30)]


@pytest.mark.parametrize(
    ("train", "others", "expected"),
    [
        (CHATS, {"evaluation": OTHERS}, set()),
        (CHATS, {"added_tokens": []}, {"unknown_tokens"}),
        ([*CHATS, *LONG], {"sequence_length": 64}, {"cut_rows"}),
        ([*CHATS, *(chat(ask=text(80)) for _ in range(9))], {"sequence_length": 80},
         {"no_answers"}),
        (CHATS, {"evaluation": [*OTHERS, *CHATS[:2]]}, {"overlap"}),
        ([*CHATS, *CHATS[:3]], {}, {"duplicates"}),
        (LABELLED, {}, set()),
        ([*LABELLED, LABELLED[0]], {}, {"duplicates"}),
        ([*LABELLED, {"text": " ", "label": "torch"}], {}, {"empty_texts"}),
        (LABELLED, {"sequence_length": 8}, {"cut_rows"}),
    ],
)  # fmt: skip
def test_each_fault_is_named(
    train: list[Any], others: dict[str, Any], expected: set[str], tmp_path: Path, cache: Any
) -> None:
    """A planted fault is found by its name, and nothing else is."""
    assert names(made(tmp_path, train, **others)) == expected


def checked(recipe: Recipe) -> str:
    """Return the lines of a training on its data, if it may start."""
    data = LoadedData(recipe)
    refuse_severe_findings_not_allowed(data, audits_streams=True)
    return "\n".join(
        line
        for part in audit_training_and_evaluation_samples(data)
        for line in part.summary_lines()
    )


@pytest.mark.parametrize(
    ("train", "others", "name"),
    [
        (CHATS, {"evaluation": CHATS}, "overlap"),
        ([chat("".join(RANDOM.choices(FOREIGN, k=90))) for _ in range(100)], {}, "unknown_tokens"),
        ([*CHATS[:9], *(chat(ask=text(80)) for _ in range(99))], {"sequence_length": 80},
         "no_answers"),
    ],
)  # fmt: skip
def test_severe_findings_end_a_training_unless_allowed(
    train: list[Any], others: dict[str, Any], name: str, tmp_path: Path, cache: Any
) -> None:
    """The error has the name that allows the finding."""
    with pytest.raises(DataError, match=rf"data\.allow_findings=\[{name}\]"):
        checked(made(tmp_path, train, **others))
    assert f"({name})" in checked(made(tmp_path, train, **others, allow_findings=[name]))


def test_an_example_is_the_end_of_a_row(tmp_path: Path, cache: Any) -> None:
    """Alpaca's rows begin alike: the example of a finding is the end of the row's text."""
    rows = [{"instruction": text(), "input": "", "output": text()} for _ in range(30)]
    twice = {**rows[3], "output": "dup ran"}
    recipe = made(tmp_path, [{"messages": []}], sequence_length=256)
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, twice, twice]))
    train = {"format": "jsonl", "path": [str(path)], "prompt": "alpaca"}
    data = {**recipe.data.model_dump(), "train": train, "chat_template": None}
    data["special_tokens"] = {"eos_token": "<|im_end|>"}
    found = audit_training_and_evaluation_samples(
        LoadedData(recipe.model_copy(update={"data": Data.model_validate(data)}))
    )
    (shown,) = [finding.text for finding in found[0].findings if finding.name == "duplicates"]
    assert shown.startswith("exact duplicates of other rows: 1, as '... ")
    assert shown.endswith("dup ran'")


def test_windows_of_text(tmp_path: Path, cache: Any) -> None:
    """Windows of one text are all of one length, learned, and without padding."""
    # A paragraph fills a window, as each of its words is a token.
    lines = [text(63) for _ in range(20)]
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(f"{line} {last}" for last in ("dog", "fox") for line in lines))
    recipe = made(tmp_path, [{"messages": []}])
    data = {**recipe.data.model_dump(), "chat_template": None, "sequence_length": 64}
    data["special_tokens"] = {}
    data["train"] = {"format": "text", "path": [str(path)]}
    whole = recipe.model_copy(update={"data": Data.model_validate(data)})
    assert "cut_rows" not in names(whole)
    line = audit_training_and_evaluation_samples(LoadedData(whole))[0].summary_lines()[0]
    assert line.startswith("data.train: 64 tokens a row, all learned (audit of ")


def test_one_source_for_both_is_no_severe_overlap(tmp_path: Path, cache: Any) -> None:
    """The recipe shows it already."""
    both = made(tmp_path, CHATS)
    data = both.data.model_copy(update={"evaluation": both.data.train})
    assert "100 of 100 rows are in data.train, too" in checked(
        both.model_copy(update={"data": data})
    )


def test_what_is_shown(tmp_path: Path, cache: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Learned text is marked, packed chats are apart, and the JSON has the same."""
    recipe = made(tmp_path, CHATS, packing=True, evaluation=OTHERS)
    show_data.run(ShowDataRequest(dump_recipe_yaml(recipe), 1, json=False, modules=""))
    shown = capsys.readouterr().out
    asked, answer = (each["content"] for each in CHATS[0]["messages"][1:])
    assert f"{asked} <|im_end|>" in shown
    assert f"[[{answer} <|im_end|>]]" in shown
    assert shown.count("data.train, sample 0: ") > 1
    assert "no findings" in shown
    show_data.run(ShowDataRequest(dump_recipe_yaml(recipe), 2, json=True, modules=""))
    part = json.loads(capsys.readouterr().out)["parts"]["data.train"]
    assert (part["audited_rows"], part["findings"], len(part["shown"])) == (100, [], 2)
    assert sum(each["rows"] for each in part["lengths"]) == 100
    pieces = part["shown"][0][0]["pieces"]
    assert [each["learned"] for each in pieces] == [False, True]


@pytest.mark.parametrize(
    ("tags", "shown"),
    [
        (["PER", "O", "LOC"], ("PER", "O", "LOC")),
        # Classes without names.
        ([2, 0, 1], ("2", "0", "1")),
    ],
)
def test_tags_are_shown_behind_their_words(
    tags: list[Any], shown: tuple[str, ...], tmp_path: Path, cache: Any, capsys: Any
) -> None:
    """Each word of a token classification has its class; a word of two tokens has one."""
    words = ["baran", "rilek", "foxes"]
    recipe = made(tmp_path, [{"text": words, "label": tags}])
    tagged = recipe.model.model_copy(update={"task": "token-classification"})
    text = dump_recipe_yaml(recipe.model_copy(update={"model": tagged}))
    show_data.run(ShowDataRequest(text, 1, json=False, modules=""))
    # The tokenizer writes a blank between the tokens of a word.
    line = re.sub(r"\]\](?! ?/)", "]]", capsys.readouterr().out)
    assert " ".join(f"[[{word}]]/{tag}" for word, tag in zip(words, shown)) in line


def test_sets_of_classes_are_shown(tmp_path: Path, cache: Any, capsys: Any) -> None:
    """A row shows the names of its classes, also where there are as many classes as tokens."""
    sets = [["sea", "sky"], [], *([name] for name in "abcdefg")]
    recipe = made(tmp_path, [{"text": "foxes", "label": names} for names in sets])
    many = recipe.model.model_copy(update={"task": "multi-label-classification"})
    data = recipe.data.model_copy(update={"sequence_length": 9})
    text = dump_recipe_yaml(recipe.model_copy(update={"model": many, "data": data}))
    show_data.run(ShowDataRequest(text, 9, json=True, modules=""))
    document = json.loads(capsys.readouterr().out)
    shown = [row["label"] for (row,) in document["parts"]["data.train"]["shown"]]
    assert shown == sets
    assert document["classes"]["sea"] == 1


OWN = """
import numpy as np
def rows(): return [{"x": np.linspace(0, 1, 8) + row, "name": "n" * row, "none": []} for row in range(3)]
def batch(rows): return {"x": np.stack([row["x"] for row in rows])}
def broken(): return {}["key"]
"""


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Tasks without a plan run in this process, with the output of their own."""

    def run(request: tasks.TaskRequest, *_: object) -> subprocess.CompletedProcess[str]:
        command = tasks.task_command(request)
        with monkeypatch.context() as own:
            own.setattr("sys.argv", ["alone", command[-1]])
            own.setattr("sys.path", [*sys.path])
            own.setattr("sys.stdin", io.StringIO(json.dumps(request._asdict())))
            own.setattr(os, "environ", {**os.environ})
            own.setattr(
                single_process, "request_signal_at_parent_end_or_exit_if_ended", lambda *_: None
            )
            status = single_process.set_up_cpu_process_and_run_task_of_stdin_request()
        return subprocess.CompletedProcess(command, status, *capsys.readouterr())

    monkeypatch.setattr(tasks, "_run_task_with_request_as_input", run)


@pytest.mark.usefixtures("in_this_process")
def test_samples_of_own_functions_are_shown(tmp_path: Path) -> None:
    """Custom data are shown with types, shapes and values, and as the batch that they become."""
    (tmp_path / "shown_rows.py").write_text(OWN)
    data = {"format": "custom", "factory": "shown_rows:rows"}
    recipe = {**CUSTOM, "data": {"train": data, "collate": "shown_rows:batch"}}
    path = tmp_path / "own.yaml"
    path.write_text(json.dumps(recipe))
    part = ortlaunch.show_data(path, samples=2)["parts"]["data.train"]
    first, _, both = part["shown"].values()
    assert part["samples"] == 3
    values = "0, 0.1429, 0.2857, 0.4286, 0.5714, 0.7143, ... from 0 to"
    assert first == {"x": f"float64 [8]: {values} 1", "name": "str ''", "none": "float32 [0]: "}
    assert both == {"x": f"float64 [2, 8]: {values} 3"}
    # An exception of the user's code has no frames of ours.
    broken = {**data, "factory": "shown_rows:broken"}
    with pytest.raises(RunError, match=r"(?s)^Traceback.*in broken.*KeyError: 'key'") as caught:
        ortlaunch.show_data(path, data={"train": broken})
    assert "ortlaunch/worker" not in str(caught.value)


def test_output_that_nobody_reads_ends_quietly(tmp_path: Path, cache: Any) -> None:
    """`data show | head` prints no traceback and succeeds."""
    asked = ShowDataRequest(dump_recipe_yaml(made(tmp_path, CHATS)), 3, json=False, modules="")
    command, request = tasks.task_command(asked), json.dumps(asked._asdict())
    read_end, write_end = os.pipe()
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=write_end, stderr=subprocess.PIPE, text=True
    )
    os.close(write_end)
    os.close(read_end)
    _, errors = process.communicate(request, timeout=60)
    assert (process.returncode, errors) == (0, "")
