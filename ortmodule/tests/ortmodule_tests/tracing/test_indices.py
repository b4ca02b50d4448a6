"""Reads and sums at several indices, as in graph networks and mixtures of experts, on ORT."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ortmodule_tests.modules import same, wrapped
from ortmodule_tests.ort import needs_ort

pytestmark = [needs_ort, pytest.mark.usefixtures("built", "seeded")]

Form = Callable[[torch.Tensor], torch.Tensor]


def changed(h: torch.Tensor, places: Any, values: torch.Tensor) -> torch.Tensor:
    """Return a copy with other values at some places."""
    z = h.clone()
    z[places] = values
    return z


# Index 0 occurs twice: its values must be summed or replaced.
TWICE = torch.tensor([0, 0, 1])
FORMS: dict[str, Form] = {
    "index_add": lambda h: h.index_add(0, TWICE, h[1:4] * 2),
    "index_add, into zeros": lambda h: torch.zeros(2, 6).index_add(0, TWICE, h[:3]),
    "index_add, from the right": lambda h: h.index_add(-1, TWICE, h[:, :3] * 3),
    "index_add, in place": lambda h: (h * 2).index_add_(0, TWICE, h[:3]),
    "index_put": lambda h: h.index_put((TWICE, TWICE), h[:3, 0] * 2, accumulate=True),
    "index_put, a number": lambda h: h.index_put((TWICE,), torch.tensor(1.0), accumulate=True),
    "index_put, not added up": lambda h: h.index_put((TWICE[1:],), h[2:4]),
    "index_put, a row": lambda h: (
        h.index_put((TWICE[1:],), h[3]) + h.index_put((TWICE,), h[3], accumulate=True)
    ),
    "index_put, one row of many": lambda h: h.index_put((TWICE[1:],), h[3:4] * 2),
    "index_put, a number at a mask": lambda h: h.index_put((h > 0,), h.mean(), accumulate=True),
    "a row at a mask of rows": lambda h: changed(h, h.sum(-1) > 0, h[0]),
    "values at a mask": lambda h: changed(h, h > 0, h[h > 0] * 2),
    "a column": lambda h: changed(h, (..., 0), h[..., 1] * 3),
    # One row in the first batch, of four rows: the export must not fix a broadcast of it.
    "a column, of one row at first": lambda h: changed(h[3:], (..., 0), h[3:, 1] * 3).sum(-1),
    "a grid": lambda h: changed(h, (TWICE[1:, None], TWICE[1:]), h[3, :2]),
    "scatter_add": lambda h: h.scatter_add(1, (h > 0).long(), h * 2),
    "scatter of constants": lambda h: h.scatter(0, torch.tensor([[0], [2]]), torch.ones(2, 1)),
    "several, from the end": lambda h: h[TWICE, torch.tensor([-1, 0, -2], dtype=torch.int32)],
    "a mask and one from the end": lambda h: h[(h == h.amax(0))[:, 0], torch.tensor([-1])],
    "a mask of two dimensions": lambda h: h.unsqueeze(0)[:, h > 0],
    "masks and Python's bools": lambda h: (
        h * ((h > 0) & True) + h * ((h > 1) == False) + h * (h > 0).masked_fill(h > 1, False)  # noqa: E712
    ),
    "diff": lambda h: torch.diff(h, n=2, prepend=h[:, :1] * 2, append=h[:, :2]),
    "diff, along the batch": lambda h: h.diff(dim=0),
    "diff of truths": lambda h: h[:, 1:] * (h > 0).diff(),
    "cumsum of truths": lambda h: h * (h > 0).cumsum(1),
}


class Summing(nn.Linear):
    """A layer and a form of its output."""

    def __init__(self, form: Form) -> None:
        super().__init__(6, 6)
        self.form = form

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.form(super().forward(x)).square().mean()


@pytest.mark.parametrize("form", list(FORMS))
def test_sums_and_gradients_are_eagers(form: str) -> None:
    """Results and gradients equal eager's, also for a second batch of another size."""
    model = Summing(FORMS[form])
    eager = copy.deepcopy(model)
    module = wrapped(model)
    # The second size must run in the graph of the first.
    for rows in (4, 7):
        x = torch.randn(rows, 6)
        ours = module(x)
        theirs = eager(x)
        ours.backward()
        theirs.backward()
        torch.testing.assert_close(ours, theirs)
        same(model, eager)


def test_an_older_opset_is_refused() -> None:
    """An opset whose Scatter has no sum is refused for sums; other forms work in every opset."""
    with pytest.raises(Exception, match=r"setting opset 16 or newer; this export uses opset 14"):
        wrapped(Summing(FORMS["index_put"]), opset=14, torch_operators="off")(torch.randn(4, 6))
    wrapped(Summing(FORMS["index_put, not added up"]), opset=14)(torch.randn(4, 6)).backward()
