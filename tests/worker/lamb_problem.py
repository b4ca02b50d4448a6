"""A small training for timm's LAMB and for ours: 50 steps in float64 on data from NumPy.

timm needs torchvision, which transformers would use if it were installed. Therefore timm's results
are stored in lamb_timm.json.

    pip install --no-deps --target FOLDER timm==1.0.31
    python -m tests.worker.lamb_problem FOLDER > tests/worker/engine/lamb_timm.json
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

STEPS = 50
SETTINGS = {"betas": (0.9, 0.999), "eps": 1e-6}
Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


def trained(make: Make) -> list[float]:
    """Return all weights after the last step.

    `make` returns the optimizer for groups with and without weight decay.
    """
    random = np.random.default_rng(3)
    net = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 2)).double()
    for parameter in net.parameters():
        parameter.data = torch.tensor(random.normal(size=parameter.shape))
    # Weights of norm 0 have no scale for the update.
    net[3].bias.data.zero_()
    optimizer = make([
        {"params": [net[0].weight, net[3].weight], "weight_decay": 0.01},
        {"params": [net[0].bias, net[1].weight, net[1].bias, net[3].bias], "weight_decay": 0.0},
    ])  # fmt: skip
    for step in range(STEPS):
        x = torch.tensor(random.normal(size=(16, 6)))
        y = torch.tensor(random.normal(size=(16, 2)))
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * (1 - step / STEPS)
        # The gradients' norm is far above the one at which timm would clip.
        loss = 50 * ((net(x) - y) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [
        float(value) for parameter in net.parameters() for value in parameter.detach().flatten()
    ]


def _of_timm(folder: Path) -> Any:
    """Return timm's Lamb without timm's __init__, which imports torchvision."""
    package = ModuleType("timms")
    package.__path__ = [str(folder / "timm" / "optim")]
    sys.modules["timms"] = package
    return importlib.import_module("timms.lamb").Lamb


if __name__ == "__main__":
    lamb = _of_timm(Path(sys.argv[1]))
    found = {
        str(always): trained(
            functools.partial(lamb, always_adapt=always, max_grad_norm=None, **SETTINGS)
        )
        for always in (False, True)
    }
    print(
        json.dumps(
            {name: [float(f"{value:.12g}") for value in values] for name, values in found.items()}
        )
    )
