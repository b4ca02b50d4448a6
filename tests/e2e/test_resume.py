"""Runs that are stopped and resumed, in the same world and in others, against undisturbed runs.

In the same world, a run that is stopped in mid-epoch has the same weights, optimizer state, export
and losses, bit for bit. In other worlds (2 ranks, then 1, then 3, with any ZeRO stage and engine),
the loss is within 1e-5 of the undisturbed curve, and the ranks read the same samples in the same
order, as their data set records. Each run is a whole `ortlaunch train`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from ortlaunch.run_folder.folder import RunDir
from tests.e2e import forked
from tests.e2e.lives import Life, differences, losses
from tests.ort import INSTALLED, build

MODULE = '''
import os
import torch
from torch import nn


def net(dropout):
    return Net(dropout)


class Net(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 33), nn.GELU(), nn.Dropout(dropout), nn.Linear(33, 1))

    def forward(self, x, y):
        return ((self.layers(x) - y) ** 2).mean()


class Data:
    """Each rank writes down which samples it reads."""

    def __init__(self, samples):
        self.x = torch.randn(samples, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        with open(f"{os.environ['TAKEN']}.{os.environ['RANK']}", "a") as file:
            file.write(f"{index}\\n")
        return {"x": self.x[index], "y": self.x[index].sum().reshape(1) / 8**0.5}


def data(samples):
    return Data(samples)
'''
# Not a multiple of the global batches, so that steps cross the end of an epoch.
SAMPLES = 100
MICRO = 8
# Of the relative difference: other worlds add gradients in another order.
LIMIT = 1e-5
SMALL = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
         "intermediate_size": 64, "max_position_embeddings": 32}  # fmt: skip
LORA: dict[str, Any] = {
    "model": {
        "task": "causal-lm", "config": SMALL,
        "lora": {"r": 4, "alpha": 8, "dropout": 0.2, "target_modules": ["q_proj", "v_proj"]},
    },
    "data": {
        "train": {"format": "text", "path": ["words.txt"]},
        "tokenizer": {"train": "bpe", "vocab_size": 300}, "sequence_length": 16,
    },
}  # fmt: skip


class Way(NamedTuple):
    """The engine, sharding, optimizer and extras of a run."""

    engine: str
    stage: int | str | None = None
    """ZeRO's stage, or `fsdp`; None: without sharding."""
    optimizer: str = "adamw"
    beside: str = ""
    """`bf16`, `lora` or nothing."""

    def __str__(self) -> str:
        stage = f"zero {self.stage}" if isinstance(self.stage, int) else self.stage or "none"
        return " ".join(filter(None, [self.engine, stage, self.optimizer, self.beside]))

    def recipe(self, size: int, dropout: float) -> dict[str, Any]:
        """Return the recipe of a toy or a small Llama with LoRA, with steps of `size` samples."""
        toy = {
            "model": {
                "task": "custom",
                "factory": "resumed_toy:net",
                "arguments": {"dropout": dropout},
            },
            "data": {
                "train": {
                    "format": "custom",
                    "factory": "resumed_toy:data",
                    "arguments": {"samples": SAMPLES},
                }
            },
        }
        return {
            "name": "resumed",
            **(LORA if self.beside == "lora" else toy),
            "batch": {"global_size": size, "micro_size": MICRO},
            "optimizer": {"name": self.optimizer, "learning_rate": 3e-3, "weight_decay": 0.01,
                          **({"momentum": 0.9} if self.optimizer == "sgd" else {})},
            "schedule": {"name": "constant"},
            "precision": "bf16" if self.beside == "bf16" else "fp32",
            "engine": {"name": self.engine, **({"parity_steps": 0} if self.engine == "ort" else {})},
            "zero": {"stage": self.stage} if isinstance(self.stage, int) else None,
            "parallel": {} if self.stage == "fsdp" else None,
            "train": {"max_steps": 1},
            "checkpoint": {"every_minutes": None, "keep": None},
            "launch": {"forward": ["TAKEN"]},
            "log": {"every_steps": 1},
        }  # fmt: skip


def train(
    home: Path, name: str, way: Way, ranks: int, steps: int, *words: str, size: int, dropout: float
) -> list[int]:
    """Run one start to its end; return its steps' samples, in the order of the global batch."""
    (home / f"{name}.yaml").write_text(yaml.safe_dump(way.recipe(size, dropout)))
    # The data set writes each index to this file; `launch.forward` passes the name to the ranks.
    os.environ["TAKEN"] = str(home / f"{name}.{steps}.taken")
    before = RunDir(home / name).complete_checkpoints()
    life = Life(home, name, f"{name}.yaml", ranks, f"train.max_steps={steps}", *words)
    life.end()
    begun = before[-1][0] if before else 0
    assert life.resumed_after() == begun
    assert json.loads(life.run.engine.read_text())["engine"]["used"] == way.engine
    return (
        []
        if way.beside == "lora"
        else list(_taken(home / f"{name}.{steps}.taken", ranks, (steps - begun) * size))
    )


def _taken(path: Path, ranks: int, count: int) -> Iterator[int]:
    """Return the last samples that each rank read, without the batch for building its engine."""
    read = [
        path.with_name(f"{path.name}.{rank}").read_text().split()[-count // ranks :]
        for rank in range(ranks)
    ]
    # A global batch has the first micro batch of each rank, then the second of each.
    for first in range(0, count // ranks, MICRO):
        for samples in read:
            yield from map(int, samples[first : first + MICRO])


# ------------------------------------------------------------ the same world

# After step 3, 96 of 100 samples are used; step 4 continues into the next epoch.
STEPS = 5
SAVED = 3
SIZE = 32
SAME = [
    *(Way(engine, stage, optimizer) for engine in ("eager", "ort") for stage in (None, 1, 2)
      for optimizer in ("adamw", "fused_adam", "sgd", *(["lamb"] if stage is None else []))),
    Way("eager", 3),
    *(Way(engine, "fsdp", optimizer) for engine in ("eager", "inductor") for optimizer in ("adamw", "sgd")),
    Way("eager", "fsdp", "fused_adam", "bf16"),
    Way("eager", "fsdp", "adamw", "lora"),
    Way("eager", None, "adamw", "bf16"),
    Way("eager", 1, "adamw", "bf16"),
    Way("eager", None, "adamw", "lora"),
    Way("ort", None, "adamw", "lora"),
    Way("ort", 1, "adamw", "lora"),
]  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the toy, texts and built extensions; chains share their first starts in it."""
    home = tmp_path_factory.mktemp("resumed")
    (home / "resumed_toy.py").write_text(MODULE)
    words = (f"the {i % 7} cats saw {i % 5} dogs near the {i % 3} old houses" for i in range(400))
    (home / "words.txt").write_text("\n\n".join(words))
    if INSTALLED:
        build()
    forked.preload()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORTLAUNCH_CACHE", str(home / "cache"))
        yield home


@pytest.mark.nightly
@pytest.mark.parametrize("way", SAME, ids=str)
def test_the_same_world(
    way: Way, home: Path, record_property: Callable[[str, object], None]
) -> None:
    """Two ranks that resume after step 3 equal the undisturbed run, bit for bit."""
    every = f"checkpoint.every_steps={SAVED}"
    name = str(way).replace(" ", "-")
    whole = train(home, name, way, 2, STEPS, every, size=SIZE, dropout=0.2)
    one = RunDir(home / name)
    other = RunDir(home / f"{name}-resumed")
    # The copy is resumed, and the original stays undisturbed.
    shutil.copytree(one.path, other.path)
    _forget_the_end(other)
    rest = train(home, other.path.name, way, 2, STEPS, every, size=SIZE, dropout=0.2)
    assert differences(one, other) == []
    assert rest == whole[SAVED * SIZE :]
    record_property("last_loss", losses(other)[-1][1])


def _forget_the_end(run: RunDir) -> None:
    """Change a run's folder into that of a run killed in its last step."""
    shutil.rmtree(run.export)
    run.summary.unlink()
    shutil.rmtree(run.checkpoint_folder(STEPS))


# ------------------------------------------------------------ other worlds

# The ranks of each start, and the step after which it ends.
LIVES = ((2, 2), (1, 4), (3, 6))
# Divides into micro batches of 8 for one, two and three ranks.
GLOBAL = 48
# Each line is a chain of three starts, each with an engine and a ZeRO stage.
OTHER = """
eager none > eager 1 > eager 2
eager none > eager 2 > eager 1
eager none > eager 3 > eager none
eager 1 > eager none > eager 3
eager 1 > eager 3 > eager 2
eager 2 > eager none > eager 1
eager 2 > eager 3 > eager 1
eager 3 > eager 1 > eager none
eager 3 > eager 2 > eager 3
ort none > eager none > ort none
ort none > eager 1 > ort 2
eager none > ort none > eager 2
eager 2 > ort 1 > ort none
eager 3 > ort 2 > ort 1
eager fsdp > eager none > eager fsdp
eager fsdp > eager 2 > eager 3
eager 3 > eager fsdp > eager fsdp
eager fsdp > ort none > inductor fsdp
eager none > eager fsdp > eager 1
"""


def _way(text: str) -> Way:
    engine, stage = text.split()
    return Way(engine, {"none": None, "fsdp": "fsdp"}.get(stage) if stage.isalpha() else int(stage))


IN_CI = ("ort none > eager 1 > ort 2", "eager fsdp > eager none > eager fsdp")


@pytest.mark.parametrize(
    "chain",
    [
        pytest.param(
            line,
            marks=[
                pytest.mark.nightly,
                *([pytest.mark.slow, pytest.mark.ci] if line in IN_CI else []),
            ],
        )
        for line in OTHER.strip().splitlines()
    ],
)
def test_other_worlds(
    chain: str, home: Path, record_property: Callable[[str, object], None]
) -> None:
    """A run on 2, 1 and 3 ranks, with changing engines, equals one undisturbed run on two ranks."""
    whole, ids = _lives(home, [])
    run, taken = _lives(home, [_way(text) for text in chain.split(" > ")])
    pairs = list(zip(losses(whole), losses(run)))
    assert (
        [step for step, _ in losses(whole)]
        == [step for step, _ in losses(run)]
        == list(range(1, LIVES[-1][1] + 1))
    )
    worst = max(abs(a - b) / a for (_, a), (_, b) in pairs)
    record_property("difference", worst)
    assert worst <= LIMIT
    assert taken == ids
    assert len(taken) == GLOBAL * LIVES[-1][1]
    # Each epoch has every sample once.
    assert all(sorted(ids[at : at + SAMPLES]) == list(range(SAMPLES)) for at in (0, SAMPLES))


def _lives(home: Path, chain: list[Way]) -> tuple[RunDir, list[int]]:
    """Return the run of a chain and its samples; chains share the starts of a common beginning."""
    name = "-".join(str(way).replace(" ", "-") for way in chain) or "straight"
    run = RunDir(home / name)
    ids = home / f"{name}.ids"
    # Written last: a folder without this file is of a failed attempt.
    if not ids.exists():
        shutil.rmtree(run.path, ignore_errors=True)
        if not chain:
            taken = train(home, name, Way("eager"), 2, LIVES[-1][1], size=GLOBAL, dropout=0.0)
        else:
            before = _lives(home, chain[:-1]) if len(chain) > 1 else None
            if before:
                shutil.copytree(before[0].path, run.path)
            ranks, steps = LIVES[len(chain) - 1]
            taken = before[1] if before else []
            taken = taken + train(home, name, chain[-1], ranks, steps, size=GLOBAL, dropout=0.0)
        ids.write_text(json.dumps(taken))
    return run, json.loads(ids.read_text())
