"""Recipes and plans for tests, from the sections that matter to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ortlaunch.plan import Plan
from ortlaunch.planning.hosts import Host
from ortlaunch.planning.make_plan import make_plan
from ortlaunch.planning.world import World
from ortlaunch.recipe import Recipe

BERT = {"model_type": "bert", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 128, "vocab_size": 1000}  # fmt: skip
CUSTOM: dict[str, Any] = {
    "name": "made",
    "model": {"task": "custom", "factory": "mine:model"},
    "data": {"train": {"format": "custom", "factory": "mine:data"}},
    "batch": {"micro_size": 2, "accumulation_steps": 1},
    "optimizer": {"name": "sgd", "learning_rate": 0.1},
    "engine": {"name": "eager"},
    "train": {"max_steps": 3},
}
OWN_MODULE = "def model(**arguments): ...\n\n\ndef data(**arguments): ...\n"  # mine.py, for plans that never run it
WORDS = {"train": "python-docs", "tokenizer": "here", "sequence_length": 128}


def recipe(**sections: Any) -> Recipe:
    """A custom model's recipe, with these sections in place of its own."""
    return Recipe.model_validate({**CUSTOM, **sections})


def bert(**sections: Any) -> Recipe:
    """A small BERT's recipe, with these sections in place of its own."""
    return recipe(**{"model": {"task": "masked-lm", "config": BERT}, "data": WORDS, **sections})


def host(name: str, slots: int, max_slots: int | None = None) -> Host:
    """A host whose devices are all of its slots."""
    return Host(name, slots, tuple(range(slots)), max_slots)


def plan(
    made: Recipe,
    hosts: Sequence[Host] = (Host("localhost", 1, (0,)),),
    launcher: str = "local",
    worker: Sequence[str] = ("python", "-m", "ortlaunch.worker"),
    environ: Mapping[str, str] | None = None,
) -> Plan:
    """The plan of a recipe on hosts, on the CPU, two threads a rank, in a shell without variables."""
    world = World(tuple(hosts), launcher, "cpu", None, (), threads=2)
    return make_plan(made, world, modules="here", worker=worker, environ=environ or {})
