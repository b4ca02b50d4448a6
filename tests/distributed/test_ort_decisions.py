"""What a model's Python code reads of tensors, branches, loops, numbers, is eager's on ONNX Runtime in every step."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ortlaunch.worker.ort.tally import tally
from tests.distributed.modules import same, wrapped
from tests.ort import needs_ort

pytestmark = [needs_ort, pytest.mark.usefixtures("built", "seeded")]

X, Y = torch.rand(4, 6) + 0.1, torch.rand(7, 6) + 0.1
Read = Callable[[Any, torch.Tensor], torch.Tensor]


class Reading(nn.Linear):
    """A layer, and what a test reads of its input."""

    def __init__(self, read: Read) -> None:
        super().__init__(6, 6)
        self.read = read
        self.register_buffer("factor", torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.read(self, super().forward(x)).square().mean()


def a_loop(model: Reading, x: torch.Tensor) -> torch.Tensor:
    for _ in range(len(x) - 3):
        x = torch.tanh(x) * 2
    return x


READS: dict[str, Read] = {
    "a branch on data": lambda model, x: x * 2 if x.sum() > 0 else x,
    "a branch on a size": lambda model, x: x * 2 if x.shape[0] > 5 else x,
    "a length": lambda model, x: x / len(x),
    "a size as a number": lambda model, x: x / math.sqrt(x.shape[0]),
    "a loop": a_loop,
    "an item": lambda model, x: x * x.max().item(),
    "a list": lambda model, x: x * x[0].tolist()[1],
    "a buffer": lambda model, x: x * float(model.factor),
}


@pytest.mark.parametrize("read", list(READS))
def test_what_python_reads_is_read_again_when_it_changes(read: str) -> None:
    """Loss and gradients, training and evaluation, where the value of the export no longer holds."""
    model = Reading(READS[read])
    eager, module = copy.deepcopy(model), wrapped(model)
    before = tally.re_exports
    for step, x in enumerate((X, -X, Y, X)):
        for given in (model, eager):
            given.factor.fill_(step + 1)
        ours, theirs = module.train()(x), eager.train()(x)
        ours.backward()
        theirs.backward()
        torch.testing.assert_close(ours, theirs)
        same(model, eager, atol=1e-5)
        torch.testing.assert_close(module.eval()(x), eager.eval()(x))
    assert tally.re_exports > before
    assert any(f"{__file__}:" in note for note in tally.notes)


def test_what_stays_true_needs_no_export() -> None:
    """A check that always passes, for batches of any size."""

    def checked(model: Reading, x: torch.Tensor) -> torch.Tensor:
        assert not x.isnan().any()
        assert x.shape[1] == 6
        return x

    module = wrapped(Reading(checked))
    before = tally.re_exports
    for x in (X, Y, -X):
        module(x).backward()
    assert tally.re_exports == before


def test_a_value_that_no_graph_can_hold_is_refused() -> None:
    """A branch by lot comes out anew in every pass, also in the one after an export."""
    module = wrapped(Reading(lambda model, x: x * torch.rand(1).item()))
    with pytest.raises(Exception, match=rf"had changed since the export, at one of {__file__}:"):
        module(X)


def test_a_batch_is_not_counted_twice() -> None:
    """BatchNorm has seen the batch when the value is found to be another: the step is refused."""

    class Normed(Reading):
        def __init__(self, read: Read) -> None:
            super().__init__(read)
            self.norm = nn.BatchNorm1d(6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(self.norm(x) + x)

    module = wrapped(Normed(READS["a branch on data"]))
    module(X * 100)
    with pytest.raises(Exception, match="had changed since the export"):
        module(X * -100)
