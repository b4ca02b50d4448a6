"""Split tensors of which not all parts have a gradient, with other sizes in each batch."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from ortmodule_tests.modules import same, wrapped
from ortmodule_tests.ort import needs_ort

pytestmark = [needs_ort, pytest.mark.usefixtures("built", "seeded")]
Form = Callable[[torch.Tensor], torch.Tensor]


def parted(h: torch.Tensor) -> torch.Tensor:
    query, key, value = h.chunk(3, -1)
    return query * key.detach() + value


def picked(h: torch.Tensor) -> torch.Tensor:
    h = h.reshape(-1, 3, 2)
    return h[:, 0] * h[:, 1].detach() + h[:, 2]


FORMS: dict[str, Form] = {
    "detached": parted,
    "unused": lambda h: h.chunk(2, -1)[1] * 2,
    "the last one": lambda h: h.split([1, 2, 3], -1)[2],
    "compared": lambda h: h[..., :3] * (h[..., 3:] > 0),
    "picked": picked,
    "sliced": lambda h: h[..., :2] * h[..., 2:4].detach() + h[..., 4:],
    "unbound": lambda h: h.reshape(-1, 2, 3).unbind(1)[0].square(),
    "unused, of a product": lambda h: (h * h).split(2, -1)[-1] * 2,
    "of a vector": lambda h: h.sum(0).split([2, 4])[1] * h[:1, :4],
    "picked, one after another": lambda h: h[..., 0] * h[..., 1].detach() + h[:, 2:].sum(1),
    # chunk(4) of 6 columns makes 3 parts of 2.
    "fewer than requested": lambda h: torch.cat(h.chunk(4, -1)[::-1], -1),
    # 22 of 24 values in the first batch, and 22 of 42 in the second.
    "the last part is smaller": lambda h: h.flatten().split(22)[0].sum() * h.flatten().split(22)[1],
    "the batch, in two": lambda h: h.chunk(2)[0].mean(0) * h.chunk(2)[1],
    # Sizes that broadcast: the result was wrong, without an error.
    "one of two": lambda h: (h[..., :2] * h[0, 3:5]).chunk(2, -1)[0],
    "one of six, in the middle": lambda h: (h * h[:1].exp()).chunk(6, -1)[3],
}


class Parts(nn.Linear):
    """A linear layer whose output is split in one of these forms."""

    def __init__(self, form: Form) -> None:
        super().__init__(6, 6)
        self.form = form

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.form(super().forward(x)) - 0.3).square().mean()


@pytest.mark.parametrize("name", list(FORMS))
def test_parts_have_eagers_gradients(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Loss and gradients are eager's, in batches of two sizes, and ONNX Runtime warns of nothing."""
    model = Parts(FORMS[name])
    eager = copy.deepcopy(model)
    module = wrapped(model)
    for rows in (4, 7):
        x = torch.randn(rows, 6)
        model.zero_grad()
        eager.zero_grad()
        ours = module(x)
        theirs = eager(x)
        ours.backward()
        theirs.backward()
        torch.testing.assert_close(ours, theirs)
        same(model, eager)
    assert "Removing initializer" not in capfd.readouterr().err
