"""Dropout masks of ONNX Runtime under the random seeds that a run sets."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ortlaunch.worker.tasks.train import random_seed_of_step
from ortmodule_tests.conftest import built
from ortmodule_tests.modules import wrapped
from tests.ort import needs_ort

__all__ = ["built"]
pytestmark = [needs_ort]


class Dropped(nn.Module):
    """A model that returns the masks of two dropouts of one size."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return nn.functional.dropout(x, 0.5), nn.functional.dropout(x, 0.5)


def test_no_mask_is_another_ones_of_the_step_before_or_the_rank_before(built: None) -> None:
    """Masks are independent across dropouts, steps and ranks, and the same seed repeats them.

    ORT counts its seeds up by one for each dropout.
    """
    module = wrapped(Dropped())
    # 1,600 elements: the tolerance of 0.07 is more than five standard deviations.
    x = torch.ones(40, 40)
    masks = []
    # Seeds of neighbours: if ORT counts a seed up, it must not reach the next one.
    for step, rank in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0)):
        torch.manual_seed(random_seed_of_step(0, step, rank))
        masks += [mask != 0 for mask in module(x)]
    for place, mask in enumerate(masks):
        assert mask.float().mean().item() == pytest.approx(0.5, abs=0.07)
        # Two independent masks at 0.5 agree in half of their elements.
        assert all(0.4 < (mask == other).float().mean() < 0.6 for other in masks[:place])
    torch.manual_seed(random_seed_of_step(0, 0, 1))
    assert (module(x)[0] != 0).equal(masks[2])
