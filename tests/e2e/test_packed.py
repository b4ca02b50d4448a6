"""Packed chats train as chats in rows of their own do, on each engine."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import SMALL, TWO_RANKS, Train, ended_well, merged
from tests.ort import needs_ort

pytestmark = [pytest.mark.slow, pytest.mark.ci]
CHATS = 16
# Chats of these lengths fill so many samples.
PACKS = 6
RECIPE: dict[str, Any] = {
    "name": "packed",
    "model": {"task": "causal-lm", "config": {"model_type": "llama", **SMALL}},
    "data": {
        "train": {"format": "jsonl", "path": "chats.jsonl", "messages_column": "messages",
                  "most_rows": CHATS},
        "tokenizer": {"train": "bpe", "vocab_size": 400},
        "sequence_length": 224,
        "chat_template": "chatml",
    },
    "engine": {"name": "eager"},
    "precision": "fp32",
    "optimizer": {"name": "sgd", "learning_rate": 0.05},
    "train": {"max_steps": 3},
    "log": {"every_steps": 1},
}  # fmt: skip


def write_chats(path: Path) -> None:
    chance = random.Random(0)
    text = "alpha beta run the model with data and save a file then load it again for"
    words = text.split()
    rows = []
    for _ in range(CHATS):
        ask, say = (" ".join(chance.choices(words, k=k)) for k in (5, chance.randint(3, 20)))
        messages = [{"role": "user", "content": ask}, {"role": "assistant", "content": say}]
        rows.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(rows))


def packed(ranks: int = 1, **sections: Any) -> dict[str, Any]:
    """Return a recipe whose steps have all chats, packed."""
    sizes = {"global_size": PACKS, "micro_size": PACKS // ranks}
    return merged(RECIPE, {"data": {"packing": True}, "batch": sizes, **sections})


@pytest.fixture
def losses_in_rows(train: Train, home: Path) -> list[float]:
    """Return the losses of the chats in rows of their own."""
    write_chats(home / "chats.jsonl")
    sizes = {"batch": {"global_size": CHATS, "micro_size": CHATS}}
    run = ended_well(train("rows", merged(RECIPE, sizes)))
    assert "packed_documents" not in run.truth()
    return run.losses()


@needs_ort
def test_packed_chats_have_the_losses_of_rows(train: Train, losses_in_rows: list[float]) -> None:
    """Two ranks without a mask, FSDP2, and engine ort with a mask: equal losses, to 1e-6."""
    cases = {
        "two-ranks": (packed(2), TWO_RANKS, "each attends alone"),
        "divided": (packed(2, parallel={}), TWO_RANKS, "each attends alone"),
        "ort": (packed(engine={"name": "ort"}), (), "apart by a mask of 224 x 224 values"),
    }
    for name, (recipe, arguments, form) in cases.items():
        run = ended_well(train(name, recipe, *arguments))
        assert run.losses() == pytest.approx(losses_in_rows, rel=1e-6), name
        assert run.truth()["packed_documents"].startswith(form)
        assert f"packed documents: {form}" in run.out


def test_packed_chats_on_inductor(train: Train, losses_in_rows: list[float]) -> None:
    """Compiled layers around the attention of each chat have equal losses, to 1e-6."""
    run = ended_well(train("inductor", packed(engine={"name": "inductor"})))
    assert run.losses() == pytest.approx(losses_in_rows, rel=1e-6)
    assert run.truth()["packed_documents"].startswith("each attends alone")
