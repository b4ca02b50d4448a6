"""Bad data end a rank with file and line and exit status 2, before it connects to other ranks."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ortlaunch.base.errors import InputError
from ortlaunch.rank import Rank
from ortlaunch.recipe import dump_recipe_yaml
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.worker import __main__ as rank_main
from ortlaunch.worker.supervision.pulse import SharedProgress
from tests.makers import BERT, bert, plan

GOOD = b'{"text": "some words", "label": 1}\n' * 3
CHAT = b'{"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"}]}\n'
# Refuses every chat that does not begin with "hello".
TEMPLATE = (
    "{% for each in messages %}{{ each['content'] }}{{ eos_token }}{% endfor %}"
    "{% if messages[0]['content'] != 'hello' %}{{ raise_exception('hello first') }}{% endif %}"
)
LLAMA = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
CLASSES = "sequence-classification"


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Fail the test if ranks connect, and restore the state of this process."""
    thresholds = gc.get_threshold()
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    # A real rank changes the allocator and the garbage collector of its process.
    monkeypatch.setattr(rank_main, "make_malloc_keep_memory_and_describe", lambda *_: None)
    monkeypatch.setattr(
        "ortlaunch.worker.process_group.distributed.join_process_group_until_end",
        lambda *_: pytest.fail("the ranks met"),
    )
    yield
    gc.set_threshold(*thresholds)


@pytest.mark.parametrize(
    ("task", "content", "config", "message"),
    [
        ("masked-lm", b"", {}, r"a.jsonl: is empty"),
        ("masked-lm", GOOD + b'{"text": "a"', {}, r"a.jsonl:4:13: is no JSON"),
        (
            "masked-lm",
            b"version https://git-lfs.github.com/spec/v1\noid",
            {},
            r"a.jsonl is a pointer of git-lfs",
        ),
        (
            "masked-lm",
            GOOD + b'{"text": ' + b"[" * 99_999,
            {},
            r"a.jsonl:4:1: is no JSON: nested too deeply",
        ),
        (
            "masked-lm",
            GOOD + b'{"text": ' + b"9" * 5000 + b"}",
            {},
            r"a.jsonl:4:1: is no JSON: Exceeds",
        ),
        (
            "masked-lm",
            b'[{"text": ' + b"[" * 99_999,
            {},
            r"a.jsonl:1:1: is no JSON: nested too deeply",
        ),
        ("masked-lm", GOOD + b'{"txt": "a"}', {}, r"a.jsonl:4: no column 'text'; it has txt"),
        ("masked-lm", GOOD + b'{"text": "\xff"}', {}, r"a.jsonl:4: is not UTF-8"),
        (
            "masked-lm",
            GOOD * 9,
            {"vocab_size": 5},
            r"model.config.vocab_size: got 5, and the tokenizer has \d+ words",
        ),
        (CLASSES, GOOD + b'{"text": "a", "label": -1}', {}, r"a.jsonl:4: label is -1"),
        (
            "sequence-regression",
            GOOD + b'{"text": "a", "label": "b"}',
            {},
            r"a.jsonl:4: label is 'b'; sequence-regression",
        ),
        (
            "token-classification",
            GOOD,
            {},
            r"a.jsonl:1: text is 'some words'; token-classification needs a list",
        ),
        (
            "causal-lm",
            CHAT + b'{"messages": [{"role": "user"}]}',
            {},
            r"a.jsonl:2: message 1 of messages has no 'content'",
        ),
        (
            "causal-lm",
            CHAT + CHAT.replace(b"hello", b"no"),
            {},
            r"a.jsonl:2: the chat template rejects it: hello first",
        ),
        (
            "token-classification",
            b'{"text": ["a", "b"], "label": [0, 0]}\n{"text": ["a", "b"], "label": [2, 0]}\n',
            {"num_labels": 2},
            r"num_labels: got 2, and .*a.jsonl:2 has label 2$",
        ),
        (CLASSES, GOOD, {"num_labels": 1}, r"num_labels: got 1, and .*a.jsonl:1 has label 1$"),
    ],
)
def test_before_the_ranks_meet(
    task: str, content: bytes, config: Any, message: str, tmp_path: Path
) -> None:
    """Each error in the data names its location, or both numbers that do not match."""
    path = tmp_path / "a.jsonl"
    run = RunDir(tmp_path / "run")
    path.write_bytes(content)
    run.path.mkdir()
    chats = task == "causal-lm"
    words = {"train": "bpe" if chats else "wordpiece", "vocab_size": 300}
    data: dict[str, Any] = {
        "train": {"format": "jsonl", "path": [str(path)]},
        "tokenizer": words,
        "sequence_length": 8,
    }
    if chats:
        data["train"]["messages_column"], data["chat_template"] = "messages", TEMPLATE
    made = bert(model={"task": task, "config": {**(LLAMA if chats else BERT), **config}}, data=data)
    run.recipe.write_text(dump_recipe_yaml(made))
    run.plan.write_text(plan(made).to_json())
    # A stand-in for the rank's watchdog.
    watchdog: Any = SimpleNamespace(
        shared_progress=SharedProgress(), set_stall_seconds_from_recipe=lambda _: None
    )
    with pytest.raises(InputError, match=message) as caught:
        rank_main.join_ranks_and_run_task(run, Rank(0, 2, 0, 2), watchdog)
    assert caught.value.exit_status == 2
