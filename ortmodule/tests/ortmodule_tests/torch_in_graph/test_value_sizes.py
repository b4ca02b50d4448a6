"""Sizes that follow from values, and empty arguments: eager's values, where nothing is selected too.

Without the repair most of these programs end the process (SIGFPE, SIGSEGV, SIGABRT).
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ortmodule._internal.base.counters import tally
from ortmodule._internal.pass_counters import PassAndGraphCounters
from ortmodule_tests.modules import same, wrapped
from ortmodule_tests.ort import needs_ort

pytestmark = [needs_ort, pytest.mark.usefixtures("built")]


class Selecting(nn.Module):
    """Programs behind a mask, as in experts, detection and losses of single tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.expert = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
        self.row = nn.Parameter(torch.randn(8))
        self.table = nn.Embedding(10, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, ids: torch.Tensor) -> list[torch.Tensor]:
        z = self.first(x)
        h, y, rows = z[mask], ids[mask] % 8, mask[:, 0]
        flat = z.flatten(0, 1)
        places = mask.flatten().nonzero()[:, 0]
        # Values put at what a mask selects: of its own rows, broadcast, a number, with other indices.
        put = [z * 1 for _ in range(5)]
        put[0][mask] = put[0][mask] * 2
        put[1][mask] = self.row
        put[2][mask] = 0.5
        put[3][mask, 0] = put[3][mask, 1] + self.row[0]
        put[4][rows, 1:3] = z[rows, 1:3].sin()
        found = [
            *put,
            self.expert(h),
            torch.zeros_like(flat).index_add(0, places, self.expert(flat[places])),
            h.sigmoid() * h.mean(1, keepdim=True) + h.square().mean(1, keepdim=True),
            (h @ h.T).softmax(-1) @ h,
            self.attention(z[rows], z[rows], z[rows])[0],
            self.table(ids[mask]).tanh(),
            self.expert(flat[: mask.sum()]),
            self.expert(z[:, 0].repeat_interleave(mask.sum(1), 0)),
            h[h[:, 0] > 0].cumsum(0),
            torch.zeros(h.shape[0], 8) + h.view(h.shape[0], 2, 4).flatten(1),
        ]
        losses = [each.sin().sum() for each in found]
        losses.append(F.cross_entropy(h, y, reduction="sum"))
        losses.append(torch.nan_to_num(F.cross_entropy(h, y)))
        losses.append(h.mean().nan_to_num())
        return losses


def batch(selected: bool, size: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(size)
    mask = torch.rand(size, 5, generator=generator) > 0.5
    mask[0, 0] = True
    x = torch.randn(size, 5, 8, generator=generator)
    return x, mask & selected, torch.randint(0, 10, (size, 5), generator=generator)


@pytest.mark.parametrize("order", [(True, False, True), (False, True, False)], ids=str)
def test_nothing_may_be_selected(order: tuple[bool, ...]) -> None:
    """Batches of which a mask selects nothing have eager's values, in training and evaluation."""
    eager = Selecting()
    model = copy.deepcopy(eager)
    ours = wrapped(model)
    batches = [batch(selected, size) for size, selected in enumerate(order, 3)]
    for values in batches:
        for one in (ours, eager):
            one.zero_grad()
        losses, expected = ours(*values), eager(*values)
        torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
        for found in (losses, expected):
            torch.stack(list(found)).sum().backward()
        same(model, eager, atol=1e-4)
    ours.eval()
    eager.eval()
    with torch.no_grad():
        for values in batches:
            torch.testing.assert_close(ours(*values), eager(*values), rtol=1e-4, atol=1e-5)


class Boxes(nn.Module):
    """A model with an argument that may be empty, as boxes of a picture without objects."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.boxes = nn.Linear(8, 8), nn.Linear(4, 8)

    def forward(self, x: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
        return (self.first(x) @ self.boxes(boxes).T).sigmoid().sum() + self.first(x).mean()


def test_an_argument_may_be_empty(witness: PassAndGraphCounters) -> None:
    """An empty argument has eager's gradients, in a graph of its own; other batches keep theirs."""
    eager = Boxes()
    model = copy.deepcopy(eager)
    ours = wrapped(model)
    exports = tally.exports
    # Twice each: the second time the graph of the first is used.
    for count in (3, 0, 2, 0):
        for one in (ours, eager):
            one.zero_grad()
            one(torch.ones(4, 8), torch.ones(count, 4)).backward()
        same(model, eager)
    assert tally.exports == exports + 2


class Normalized(nn.Module):
    """A BatchNorm of what a mask selects."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(x)[mask]).square().mean()


def test_batch_norm_of_a_selection_keeps_its_statistics() -> None:
    """A BatchNorm behind a mask has eager's statistics: it runs as torch."""
    eager = Normalized()
    model = copy.deepcopy(eager)
    ours = wrapped(model)
    for size in (3, 4):
        x, mask, _ = batch(True, size)
        for one in (ours, eager):
            one.zero_grad()
            one(x, mask).backward()
        same(model, eager)


class Reading(nn.Linear):
    """A model that reads the size of a selection in Python."""

    def __init__(self, program: Any) -> None:
        super().__init__(8, 8)
        self.program = program

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.program(super().forward(x), mask)


@pytest.mark.parametrize(
    "program",
    [
        lambda z, mask: z[mask].sum() if len(z[mask]) else z.sum(),
        lambda z, mask: z[:, mask[0]].sin().sum() / max(z[:, mask[0]].sin().shape[1], 1),
        lambda z, mask: z.sum() if mask.nonzero().size(0) > 2 else z.mean(),
        lambda z, mask: z.sum() if mask.nonzero().size(0) - 1 > 0 else z.mean(),
        lambda z, mask: z.sum() if (mask & ~mask).nonzero().size(0) > 0 else z.mean(),
    ],
    ids=["len", "shape", "size", "difference", "nothing"],
)
def test_the_size_of_a_selection_is_not_taken_into_python(program: Any) -> None:
    """A size that follows from values would be the first batch's: it is refused, with the line."""
    x, mask, _ = batch(True, 3)
    with pytest.raises(RuntimeError, match=r"takes values of tensors .* at .*test_value_sizes"):
        wrapped(Reading(program))(x, mask)


def test_a_branch_for_nothing_selected_is_noted() -> None:
    """As in DeBERTa's loss, where every label may be ignored; the first batch selects something."""
    x, mask, _ = batch(True, 3)
    model = Reading(
        lambda z, mask: z[mask.nonzero()[:, 0]].sum() if mask.nonzero().size(0) > 0 else z.sum()
    )
    torch.testing.assert_close(wrapped(copy.deepcopy(model))(x, mask), model(x, mask))
    assert any("checked in the first batch only" in note for note in tally.notes)


def test_other_sizes_of_a_selection_are_taken() -> None:
    """The number of columns of a selection does not follow from values."""
    x, mask, _ = batch(True, 3)
    model = Reading(lambda z, mask: z[mask].sum() if z[mask].shape[-1] > 3 else z.sum())
    torch.testing.assert_close(wrapped(copy.deepcopy(model))(x, mask), model(x, mask))
