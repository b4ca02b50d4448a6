"""The training loop in this process: what it logs, and what it refuses to go on with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.training import train_here

STEPS = {"max_steps": 6}
ROWS = [{"x": row, "y": row.sum()} for row in torch.randn(64, 4, generator=torch.Generator().manual_seed(0))]


class Line(nn.Module):
    """A weighted sum, and its mean squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((x @ self.weight - y) ** 2).mean()


@pytest.mark.parametrize("sections", [
    {"checkpoint": {"every_steps": 4}},
    {"train": {**STEPS, "evaluate_every_steps": 4}},
], ids=["checkpoints", "evaluation"])  # fmt: skip
def test_the_logged_loss_is_of_all_steps_since_the_last_line(sections: dict, tmp_path: Path) -> None:
    """What is done between two log lines, a checkpoint or an evaluation, takes no step out of their loss."""
    log = {"train": STEPS, "log": {"every_steps": 6}}
    plain = train_here(tmp_path / "plain", Line(), ROWS, evaluation=ROWS[:4], **log)
    other = train_here(tmp_path / "other", Line(), ROWS, evaluation=ROWS[:4], **{**log, **sections})
    assert other.values("loss") == plain.values("loss")
