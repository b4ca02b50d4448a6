"""The export of engine ort runs two rows where their graph is the one of a micro batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ortmodule._internal.base.counters import tally
from tests.ort import needs_ort
from tests.training import Trained, session_here, train_session_here

pytestmark = needs_ort


class Model(nn.Module):
    """A model whose loss depends on all rows of a batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loss(self.norm(self.layer(x)))


class InBatchNegatives(Model):
    """Each row's other half is its label, and those of all other rows are negatives."""

    def loss(self, outputs: torch.Tensor) -> torch.Tensor:
        first, second = outputs.chunk(2, dim=1)
        scores = first @ second.T
        return nn.functional.cross_entropy(scores, torch.arange(scores.shape[0]))


class View(Model):
    """Rows become positions of one row, and are rows again."""

    def loss(self, outputs: torch.Tensor) -> torch.Tensor:
        flat = outputs.view(1, -1)
        return (flat.softmax(dim=1) * flat).view(outputs.shape[0], -1).square().sum()


class LargeBatches(Model):
    """Python code chooses the loss by the number of rows."""

    def loss(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs.square().mean() if outputs.shape[0] > 3 else outputs.abs().mean()


class FourRows(Model):
    """Fewer rows are an error."""

    def loss(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs.unflatten(0, (-1, 4)).square().mean()


@pytest.mark.parametrize(
    ("model_class", "export_count", "reason"),
    [
        (InBatchNegatives, 1, ""),
        (View, 1, ""),
        (LargeBatches, 2, "a size or buffer"),
        (FourRows, 1, "RuntimeError: "),
    ],
)
def test_two_rows_make_the_graph_of_a_micro_batch(
    tmp_path: Path, model_class: type[Model], export_count: int, reason: str
) -> None:
    """Losses and gradient norms are eager's; where two rows do not do, a note says why."""
    torch.manual_seed(1)
    samples = [{"x": torch.randn(4)} for _ in range(40)]

    def train(engine: str) -> tuple[Trained, tuple[str, ...]]:
        session = session_here(
            tmp_path / engine,
            model_class(),
            samples,
            batch={"global_size": 8, "micro_size": 8},
            engine={"name": engine},
            train={"max_steps": 5},
            log={"every_steps": 1},
        )
        return train_session_here(session), session.engine.notes

    exports_before = tally.exports
    (ort, notes), (eager, _) = map(train, ("ort", "eager"))
    for name in ("loss", "gradient_norm"):
        expected = [value for _, value in eager.values(name)]
        assert len(expected) == 5
        assert [value for _, value in ort.values(name)] == pytest.approx(expected, rel=1e-5), name
    assert tally.exports - exports_before == export_count
    reasons = [note for note in notes if "whole micro batch" in note]
    assert len(reasons) == bool(reason)
    assert all(reason in note for note in reasons)
