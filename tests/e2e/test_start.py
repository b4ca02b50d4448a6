"""The modules that a rank imports until its end: an import of an unused library takes seconds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import BERT, SMALL, TOY, Train, ended_well, merged
from tests.ort import INSTALLED

_LABELS = {"format": "jsonl", "path": "labels.jsonl"}
_CHATS = {"format": "jsonl", "path": "chats.jsonl", "messages_column": "messages"}
_TEXT_DATA = {name: BERT["data"][name] for name in ("tokenizer", "sequence_length")}
# The recipe of each task, and the most modules of a rank on eager.
TASKS: dict[str, tuple[dict[str, Any], int]] = {
    "pretraining": (BERT, 3150),
    "classes": (
        {
            **merged(BERT, {"model": {"task": "sequence-classification"}}),
            "data": {**_TEXT_DATA, "train": _LABELS, "evaluation": _LABELS},
        },
        3600,
    ),
    "chats": (
        {
            **BERT,
            "model": {
                "task": "causal-lm",
                "config": {"model_type": "llama", **SMALL, "max_position_embeddings": 64},
                "lora": {"r": 4, "target_modules": ["q_proj", "v_proj"]},
            },
            "data": {
                **_TEXT_DATA,
                "train": _CHATS,
                "evaluation": _CHATS,
                "tokenizer": {"train": "bpe", "vocab_size": 300},
                "sequence_length": 64,
                "chat_template": "chatml",
            },
        },
        3400,
    ),
    "custom": (TOY, 2550),
}
# ONNX Runtime and ONNX.
MODULES_OF_ORT = 450
# No rank of these tasks calls anything of these.
UNUSED = (
    "torch._inductor.graph", "deepspeed", "datasets", "mlflow", "optuna", "pandas", "sklearn",
    "tensorboard", "wandb", "IPython",
)  # fmt: skip
UNUSED_ON_EAGER = ("onnx", "onnxruntime")
# Python imports it at its start. A rank ends by `os._exit`.
_HOOK = """
import os, sys

def note_modules_and_exit(status):
    if "ortlaunch.worker" in sys.orig_argv:
        with open(os.path.join(sys.orig_argv[-1], "modules.json"), "w") as file:
            file.write(repr([*sys.modules]).replace("'", '"'))
    end(status)

end, os._exit = os._exit, note_modules_and_exit
"""


@pytest.fixture(scope="module")
def modules(train: Train, home: Path) -> Iterator[dict[tuple[str, str], set[str]]]:
    """The names in sys.modules at the end of a rank, by task and engine."""
    (home / "hook").mkdir()
    (home / "hook" / "sitecustomize.py").write_text(_HOOK)
    chat = [{"role": "user", "content": "the old cats"}, {"role": "assistant", "content": "dogs"}]
    (home / "chats.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 40)
    runs = [(task, "eager") for task in TASKS]
    if INSTALLED:
        runs.append(("classes", "ort"))

    def modules_of_rank(run: tuple[str, str]) -> set[str]:
        recipe = merged(TASKS[run[0]][0], {"engine": {"name": run[1]}, "train": {"max_steps": 6}})
        folder = ended_well(train("-".join(run), recipe)).folder
        return set(json.loads((folder / "modules.json").read_text()))

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setenv("PYTHONPATH", str(home / "hook"))
        yield dict(zip(runs, pool.map(modules_of_rank, runs)))


def test_a_rank_imports_no_library_that_its_task_leaves_unused(
    modules: dict[tuple[str, str], set[str]],
) -> None:
    """Datasets, trackers and the engines of others stay out, also where they are installed."""
    for (task, engine), names in modules.items():
        unused = UNUSED if engine == "ort" else (*UNUSED, *UNUSED_ON_EAGER)
        assert [name for name in unused if name in names] == [], (task, engine)
    assert "peft" in modules["chats", "eager"]
    assert [task for (task, _), names in modules.items() if "peft" in names] == ["chats"]
    assert not any(name.startswith("transformers.") for name in modules["custom", "eager"])


def test_a_rank_imports_about_as_many_modules_as_it_needs(
    modules: dict[tuple[str, str], set[str]],
) -> None:
    """The counts are limits, a tenth above those of torch 2.13 and transformers 5.23."""
    # transformers' losses and torchmetrics import scipy where it is installed, as sentence-transformers needs.
    counts = {
        run: sum(not name.startswith("scipy") for name in names) for run, names in modules.items()
    }
    limits = {
        (task, engine): TASKS[task][1] + (MODULES_OF_ORT if engine == "ort" else 0)
        for task, engine in counts
    }
    assert {run: count for run, count in counts.items() if count > limits[run]} == {}
