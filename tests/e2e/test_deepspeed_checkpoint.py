"""A checkpoint that somebody else's DeepSpeed wrote is taken in once; the losses go on as they do there."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from ortlaunch.worker.checkpoint.restore import Shards
from ortlaunch.worker.named_state import Part
from tests.e2e.runs import COMMAND, EAGER, Run, ended_well, environment
from tests.torchrun import torchrun

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.slow

NET = '''
import torch
from torch import nn


class Net(nn.Module):
    """Layers, a buffer and a size that two ranks do not share evenly."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 1)
        self.register_buffer("scale", torch.tensor([0.5]))

    def forward(self, x, y):
        return ((self.last(torch.tanh(self.norm(self.first(x)))) - y * self.scale) ** 2).mean()


def net():
    torch.manual_seed(1)
    return Net()


def data():
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(8, 7, generator=generator)
    return [{"x": row, "y": row.sum().reshape(1)} for row in rows]
'''
RECIPE: dict[str, Any] = {
    "name": "theirs",
    "model": {"task": "custom", "factory": "net:net"},
    "data": {"train": {"format": "custom", "factory": "net:data"}},
    "batch": {"global_size": 8, "micro_size": 8},
    "optimizer": {"name": "adamw", "learning_rate": 0.01, "weight_decay": 0.1, "no_decay": ["none of them"]},
    "schedule": {"name": "constant"},
    "seed": 5,  # which makes other weights: all must come from the file
    "train": {"max_steps": 5},
    "log": {"every_steps": 1},
    **EAGER,
}


def theirs(home: Path, stage: int, precision: str, ranks: int) -> list[float]:
    """Five losses of DeepSpeed's own, which saved after three into the folder `theirs`."""
    (home / "net.py").write_text(NET.replace("torch.manual_seed(1)", "torch.manual_seed(4)"))
    (home / "theirs").mkdir()
    script = str(Path(__file__).with_name("theirs.py"))
    torchrun(ranks, script, str(stage), precision, "theirs", timeout=300, cwd=home)
    (home / "net.py").write_text(NET)
    return list(json.loads((home / "theirs/losses.json").read_text()))


def ours(home: Path, *words: str) -> Run:
    (home / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    command = [str(COMMAND), "train", "recipe.yaml", "--run-dir=run", *words]
    done = subprocess.run(
        command, cwd=home, env=environment(home), capture_output=True, text=True, timeout=120, check=False
    )
    return ended_well(Run(home / "run", done.returncode, done.stdout, done.stderr))


@pytest.mark.parametrize(("stage", "precision", "ranks"), [(1, "fp32", 2), (2, "fp32", 2), (0, "fp32", 1)])
def test_goes_on_as_deepspeed_does(stage: int, precision: str, ranks: int, tmp_path: Path) -> None:
    """From three steps there: the next two losses are theirs, in a world without DeepSpeed."""
    expected = theirs(tmp_path, stage, precision, ranks)
    run = ours(tmp_path, "--resume=deepspeed:theirs")
    assert f"taken in as step 3: {tmp_path}/theirs/global_step3 of" in run.out
    assert re.search(rf"DeepSpeed [\d.]+, ZeRO {stage}.*; 24 samples seen", run.out)
    assert run.values("loss") == [(4, pytest.approx(expected[3], rel=1e-6)), (5, pytest.approx(expected[4], rel=1e-6))]
    assert expected[3] != pytest.approx(expected[0], rel=1e-3)


def test_bf16_masters(tmp_path: Path) -> None:
    """ZeRO 1 in bf16 on two ranks: the float32 weights are taken, as DeepSpeed's zero_to_fp32 finds them."""
    theirs(tmp_path, 1, "bf16", 2)
    run = ours(tmp_path, "--resume=deepspeed:theirs/global_step3", "train.max_steps=4")
    masters = load_file(tmp_path / "theirs/masters.safetensors")
    shards = Shards(run.folder / "checkpoints/step_00000003")
    for name, value in masters.items():
        if name != "scale":
            found = torch.empty(value.numel())
            shards.read("weight", Part(f"model.{name}", 0, value.numel(), found, 0, {}), found)
            assert torch.equal(found, value.reshape(-1)), name
    assert any(not torch.equal(value, value.bfloat16().float()) for value in masters.values())
