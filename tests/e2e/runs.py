"""Shared parts of the tests of whole runs: a toy model, a small BERT, and a finished run."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ortlaunch.run_folder.folder import RunDir

ROOT = Path(__file__).parents[2]
COMMAND = Path(sys.executable).with_name("ortlaunch")
TWO_RANKS = ("--launcher=torchrun", "--nproc-per-node=2")
EAGER = {"engine": {"name": "eager"}}

TOYS = '''
import os
import torch
from torch import nn


class Net(nn.Module):
    """Dropout, and once in the life of a run a failure: in pass `fail_at` of rank 0, when there is no `mark` yet."""

    def __init__(self, dropout, fail_at, mark, scale):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 1))
        self.fail_at, self.mark, self.scale, self.passes = fail_at, mark, scale, 0

    def forward(self, x, y):
        if self.training and self.fail_at and os.environ["RANK"] == "0" and not os.path.exists(self.mark):
            self.passes += 1
            if self.passes == self.fail_at:
                open(self.mark, "w").close()
                raise RuntimeError("as a machine that fails")
        return self.scale * ((self.layers(x) - y) ** 2).mean()


class Attending(nn.Module):
    """Attention as torch ships it, and an operator that has no ONNX form."""

    def __init__(self):
        super().__init__()
        self.attention, self.out = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 1)

    def forward(self, x, y):
        x = x[:, None, :].expand(-1, 4, -1)
        x = torch.logcumsumexp(self.attention(x, x, x)[0], dim=-1)
        return ((self.out(x).mean(1) - y) ** 2).mean()


class Partial(nn.Module):
    """Parameters that the loss uses never, for some batches or in the first `until` passes, and batch statistics."""

    def __init__(self, sometimes, until, freeze):
        super().__init__()
        self.layers = nn.Sequential(nn.BatchNorm1d(8, momentum=0.5), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
        self.spare, self.lonely = nn.Linear(8, 1), nn.Parameter(torch.ones(2))
        self.sometimes, self.until, self.passes = sometimes, until, 0
        if until:
            self.lonely = None
        if freeze:
            self.spare.requires_grad_(False)
            self.lonely.requires_grad_(False)

    def forward(self, x, y):
        out = self.layers(x)
        if self.until:
            self.passes += self.training
        if (self.sometimes and x[0, 0] > 0.5) or 0 < self.passes <= self.until:
            out = out + self.spare(x)
        return ((out - y) ** 2).mean()


def partial(sometimes=False, until=0, freeze=False):
    return Partial(sometimes, until, freeze)


def net(dropout=0.0, fail_at=0, mark="", scale=1.0):
    return Net(dropout, fail_at, mark, scale)


def attending():
    return Attending()


def data(samples=256, seed=0, nan_at=None):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 8, generator=generator)
    if nan_at is not None:
        x[nan_at] = float("nan")
    return [{"x": row, "y": row.sum().reshape(1)} for row in x]
'''

# A module beside TOYS. While the file `slow` exists, a pass takes 0.25 s more, so that a test can
# send a request at a chosen step.
SLOW = """
import os, time
from toys import Net, data

class Slow(Net):
    def forward(self, x, y):
        time.sleep(0.25 if os.path.exists(os.path.join(os.path.dirname(__file__), "slow")) else 0)
        return super().forward(x, y)

def net(dropout=0.0):
    return Slow(dropout, 0, "", 1.0)
"""
TOY: dict[str, Any] = {
    "name": "toy",
    "model": {"task": "custom", "factory": "toys:net"},
    "data": {"train": {"format": "custom", "factory": "toys:data"}},
    "batch": {"global_size": 16, "micro_size": 4},
    "optimizer": {"name": "adamw", "learning_rate": 1e-2},
    "train": {"max_steps": 10},
    "log": {"every_steps": 1},
}


class Run(NamedTuple):
    """A finished run: its folder, exit status and output."""

    folder: Path
    status: int
    out: str
    err: str

    def records(self) -> list[dict[str, Any]]:
        return [
            json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()
        ]

    def values(self, name: str) -> list[tuple[int, Any]]:
        """Return (step, value) of every record that has the value."""
        return [(record["step"], record[name]) for record in self.records() if name in record]

    def losses(self) -> list[float]:
        """Return the losses by step, and check that every step is recorded once."""
        steps, losses = zip(*self.values("loss"))
        assert steps == tuple(range(1, len(steps) + 1))
        return list(losses)

    def truth(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "engine.json").read_text()))

    def files(self) -> set[str]:
        return {
            str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file()
        }


Train = Callable[..., Run]


def merged(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    both = {
        key: merged(base[key], value)
        for key, value in top.items()
        if isinstance(value, dict) and isinstance(base.get(key), dict)
    }
    return {**base, **top, **both}


# A recipe whose run writes every type of record.
FULL = merged(
    TOY,
    {
        **EAGER,
        "model": {"arguments": {"dropout": 0.3}},
        "data": {
            "evaluation": {
                "format": "custom",
                "factory": "toys:data",
                "arguments": {"samples": 17, "seed": 1},
            }
        },
        "train": {"max_grad_norm": 0.5, "evaluate_every_steps": 4},
        "checkpoint": {"every_steps": 5, "keep": 1},
        "log": {"trackers": ["tensorboard"]},
    },
)


def step_of(run: RunDir) -> int:
    """Return the newest logged step; 0 if none is logged."""
    lines = run.metrics.read_text().splitlines() if run.metrics.exists() else []
    return max((json.loads(line)["step"] for line in lines), default=0)


def reach(run: RunDir, step: int, command: subprocess.Popen[str] | None = None) -> None:
    """Wait until the run has logged this step; `command` must still run."""
    deadline = time.monotonic() + 90
    while step_of(run) < step:
        assert command is None or command.poll() is None, command.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def environment(home: Path) -> dict[str, str]:
    """Return environment variables for tiny models: one thread, no network, the tests' cache."""
    # Waiting threads that spin would slow the other processes of a shared machine.
    quiet = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **quiet, "ORTLAUNCH_CACHE": str(home / "cache")}


def ended_well(run: Run) -> Run:
    assert run.status == 0, f"{run.out[-3000:]}\n{run.err[-3000:]}"
    return run


def interrupted(
    train: Train, home: Path, name: str, recipe: dict[str, Any], *arguments: str
) -> Run:
    """Run a recipe that fails at step 7, start it again, and return the second run."""
    # The first pass of step 7, whose number depends on the ranks: two if there are arguments.
    fails = {
        "model": {
            "arguments": {"dropout": 0.3, "fail_at": 1 + 6 * 16 // 4 // (1 + len(arguments) // 2)}
        }
    }
    recipe = merged(
        merged(recipe, fails), {"model": {"arguments": {"mark": str(home / f"{name}.failed")}}}
    )
    failed = train(name, recipe, *arguments)
    assert failed.status == 1
    assert "as a machine that fails" in failed.err
    assert [step for step, _ in failed.values("loss")] == [1, 2, 3, 4, 5, 6]
    # An incomplete checkpoint, as a machine leaves it that fails during a save.
    (failed.folder / "checkpoints/step_00000006").mkdir()
    (failed.folder / "checkpoints/step_00000006/manifest.json").write_text("{}")
    return ended_well(train(name, recipe, *arguments))


def exported_evaluation(run: Run, home: Path) -> float:
    """Return the exported weights' loss on the 17 evaluation samples, in plain PyTorch."""
    import torch
    from safetensors.torch import load_model

    # Not imported: a later test's export would find this file's module in sys.modules.
    toys = runpy.run_path(str(home / "toys.py"))
    # eval() switches the dropout off.
    model = toys["net"](dropout=0.3).eval()
    load_model(model, str(run.folder / "export/model.safetensors"))
    samples = toys["data"](samples=17, seed=1)
    with torch.no_grad():
        return float(
            model(
                **{name: torch.stack([sample[name] for sample in samples]) for name in ("x", "y")}
            )
        )


def exported_again(run: Run, home: Path) -> bool:
    """Return whether `ortlaunch export` of the newest checkpoint equals the run's own export."""
    again = home / f"{run.folder.name}-again"
    command = [str(COMMAND), "export", run.folder.name, f"--to={again.name}"]
    ended = subprocess.run(
        command,
        cwd=home,
        env=environment(home),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (
        0,
        f"export of step {run.values('loss')[-1][0]}: {again.name}\n",
    ), ended
    files = [{path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
             for folder in (again, run.folder / "export")]  # fmt: skip
    return files[0] == files[1]


SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
BERT: dict[str, Any] = {
    "name": "bert",
    "model": {
        "task": "masked-lm",
        "config": {"model_type": "bert", **SMALL, "max_position_embeddings": 32},
    },
    "data": {
        "train": {"format": "text", "path": ["train.txt"]},
        "evaluation": {"format": "text", "path": ["held-out.txt"]},
        "tokenizer": {"train": "wordpiece", "vocab_size": 300},
        "sequence_length": 16,
    },
    "batch": {"global_size": 16, "micro_size": 8},
    "optimizer": {"name": "fused_adam", "learning_rate": 1e-2},
    "engine": {"name": "ort"},
    "train": {"max_steps": 12, "evaluate_every_steps": 6},
    "log": {"every_steps": 1},
}
