"""Operators whose ONNX form, or ORT's gradient of it, differs from torch's function.

They differ at zero, for large values, or with broadcasts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from ortmodule._internal.native import extensions
from ortmodule_tests.modules import wrapped
from ortmodule_tests.ort import needs_ort

pytestmark = [needs_ort, pytest.mark.usefixtures("built", "seeded")]
Form = Callable[[torch.Tensor, nn.Parameter], torch.Tensor]
POWERS = torch.arange(3.0)
ZERO = torch.tensor(0.0)
COLUMNS = torch.tensor([0, 0])
ONES = torch.tensor([0.0, 1.0, 1.0, 0.0])


def nothing(h: torch.Tensor) -> torch.Tensor:
    """Return zeros that have a gradient."""
    return h - h.detach()


# Forms that ONNX Runtime computes, with torch_operators off.
FORMS: dict[str, Form] = {
    "the logarithm of a small probability": lambda h, w: (h * 9 - 30).sigmoid().log(),
    "the spread of equal numbers": lambda h, w: (
        (h * 0 + 2).std(-1) + h.std(0, unbiased=False).sum()
    ),
    "the spread of each": lambda h, w: torch.std_mean(h * (h[:, :1] > 0), -1)[0],
    "differences of no order": lambda h, w: torch.diff(h, 0, prepend=h).exp(),
    "the greater of integers": lambda h, w: h * torch.maximum(h.long(), COLUMNS[:1]),
    "integers divided": lambda h, w: (
        h * ((h * 9).long() // 3) + h * ((h * 9).long() // -torch.tensor(4))
    ),
    "a size divided upwards": lambda h, w: h[: -(-h.shape[0] // 4)].exp(),
    "a root of what is not below zero": lambda h, w: (
        h.clamp(min=0).sqrt() + h.clamp(max=0).neg().sqrt()
    ),
}
# Operators that torch computes.
# unfold returns a view.
TORCHS: dict[str, Form] = {
    "a sure loss": lambda h, w: functional.binary_cross_entropy_with_logits(
        h * 90, ONES.expand_as(h)
    ),
    "a sure loss, weighted": lambda h, w: functional.binary_cross_entropy_with_logits(
        h * 90, ONES.expand_as(h), weight=ONES + 1, pos_weight=w.detach().abs(), reduction="sum"
    ),
    "a loss of each, of soft labels": lambda h, w: functional.binary_cross_entropy_with_logits(
        h * 9, w.sigmoid().expand_as(h), reduction="none"
    ),
    "logsigmoid": lambda h, w: functional.logsigmoid(h * 200) + functional.logsigmoid(h * 0),
    "a root of the greater": lambda h, w: (
        torch.maximum(h, ZERO).sqrt() + torch.minimum(h, ZERO).neg().sqrt()
    ),
    "the greater of equal ones": lambda h, w: (
        torch.maximum(h, nothing(w) + h.detach()) + torch.minimum(h, w)
    ),
    "relu6 at its bounds": lambda h, w: (
        functional.relu6(nothing(h)) + functional.relu6(nothing(h) + 6) + h
    ),
    "relu6 in place": lambda h, w: functional.relu6(h * 9, inplace=True),
    "hardtanh at its bounds": lambda h, w: functional.hardtanh(nothing(h) - 0.5, -0.5, 0.5) * 2 + h,
    "two parts": lambda h, w: h.tensor_split(2, 0)[0].sum() * h.tensor_split(2, 0)[1],
    "uneven parts": lambda h, w: h.tensor_split(3, -1)[0] * h.tensor_split(3, 0)[0].sum(),
    "parts between places": lambda h, w: h.tensor_split((1, 3), -1)[1] + h.tensor_split([-2], 1)[1],
    "slopes": lambda h, w: torch.gradient(h, dim=1)[0] * h + torch.stack(torch.gradient(h)).sum(0),
    "sums at indices": lambda h, w: (
        h.index_add(-1, COLUMNS, h[:, :2], alpha=2) * h.index_add(0, COLUMNS, h[:2])
    ),
    "a pool without a batch": lambda h, w: (
        functional.avg_pool2d(h[None], 2) + functional.max_pool2d(h[None], 2)
    ),
    "an adaptive pool without a batch": lambda h, w: functional.adaptive_avg_pool2d(h[None], 2),
    "an exponent that learns": lambda h, w: (h.abs() + 0.1) ** w,
    "a number to a power": lambda h, w: 2.0**h + torch.exp2(h) + w[0].abs() ** h,
    "generalized mean": lambda h, w: (
        h.clamp(min=1e-6).pow(w[:1] + 3).mean(0).pow(1.0 / (w[:1] + 3))
    ),
    "powers of one number": lambda h, w: (h[:, :1].unsqueeze(-1) ** POWERS) * h.unsqueeze(-1),
    "powers of zero": lambda h, w: nothing(h) ** 0 + nothing(h) ** 1 + nothing(h) ** 2,
    "a bound that learns": lambda h, w: h.clamp(min=w[0]) + h.clamp(max=w[1].exp()),
    "log1p": lambda h, w: torch.log1p(h.abs() * 1e-7) * 1e7,
    "cosine of nothing": lambda h, w: (
        functional.cosine_similarity(h * 0, w.expand_as(h), -1) + h[:, 0]
    ),
    "cosine of two vectors": lambda h, w: functional.cosine_similarity(h[0], w, 0),
    "distance": lambda h, w: (
        functional.pairwise_distance(h, w, p=1.0) + functional.pairwise_distance(h, h)
    ),
    "distances": lambda h, w: torch.cdist(h, h) + torch.cdist(h, w.expand_as(h), p=1.0),
    "norms": lambda h, w: h.norm(dim=-1) * h.norm() + h[:, 0].norm(),
    "a norm of nothing": lambda h, w: torch.linalg.vector_norm(h * 0, 3.0, -1) + h[:, 0],
    "the most of each": lambda h, w: torch.zeros_like(h).scatter_reduce(
        1, (h > 0).long(), h, "amax"
    ),
    "floats divided": lambda h, w: h * (h.detach() // 0.3) + h * (h.detach() // (w.detach() - 0.1)),
    "a number divided": lambda h, w: h * (h.detach().mean() // 0.3),
    "a rounded quotient": lambda h, w: (
        h * torch.div(h.detach() * 0 + 1, 0.1, rounding_mode="floor")
    ),
    "functions of a number": lambda h, w: (
        torch.addcmul(h.mean(), h.mean(), w[0], value=0.5) * h.sum().abs().log10().nan_to_num()
    ),
    "one of numbers": lambda h, w: h[0] * functional.one_hot(h[0].argmax(), 4),
    "a loss of no dimensions": lambda h, w: (
        # hardshrink's gradient in ORT has one dimension, of size 1.
        functional.hardshrink(
            functional.binary_cross_entropy(
                h.sigmoid(), w.sigmoid().detach().expand_as(h), reduction="sum"
            )
            * 3
        )
        .square()
        .mean()
    ),
    "hashes of integers": lambda h, w: h * (((h.detach() * 9).long() + 3) ** 41 % 1009),
    "shifts of negative integers": lambda h, w: h * ((h.detach() * 9).long() >> 1),
    "a turn and more": lambda h, w: h.roll(5, -1) * h.roll((1, -7), (0, 1)) + h.roll(3),
    "backwards": lambda h, w: h.flip(-1) * h + h.flip((0, 1)),
    "a copied column": lambda h, w: h.index_copy(-1, torch.tensor([0]), h[:, 1:2] * 3) * h,
    "a filled column": lambda h, w: h.index_fill(-1, torch.tensor([0, 2]), -1.5).exp() * h,
    "windows side by side": lambda h, w: h.exp().flatten().unfold(0, 2, 2),
    "a negative slope": lambda h, w: functional.leaky_relu(h, -0.5),
    "a picture and a half": lambda h, w: functional.interpolate(
        h[None, None, :5], scale_factor=1.7
    ),
}


class Net(nn.Module):
    """A form behind a layer, with a weight of its own; each result has a different factor."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form
        self.layer = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.form(self.layer(x), self.weight)


def compare(form: Form, **settings: str) -> None:
    """Compare results and gradients of two batches with eager's."""
    model = Net(form)
    eager = copy.deepcopy(model)
    module = wrapped(model, **settings)
    for rows in (6, 5):
        x = torch.randn(rows, 4)
        found = []
        for net, called in ((model, module), (eager, eager)):
            net.zero_grad()
            y = called(x)
            # A factor of its own for each result, so that exchanged results show.
            (y * torch.arange(1.0, y.numel() + 1).reshape(y.shape).cos()).sum().backward()
            grads = [
                # The weight has no gradient if the form does not use it.
                torch.zeros_like(p) if p.grad is None else p.grad.clone()
                for p in net.parameters()
            ]
            found.append([y.detach(), *grads])
        for ours, theirs in zip(*found):
            # If eager's own values are not finite, the case is wrong.
            assert theirs.isfinite().all()
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", list(FORMS))
def test_a_form_is_torchs(name: str) -> None:
    """Loss and gradients that ONNX Runtime computes equal eager's, and are finite."""
    compare(FORMS[name], torch_operators="off")


@pytest.mark.skipif(
    bool(extensions.reason_interop_is_unbuildable_or_empty()),
    reason="ONNX Runtime's torch_interop_utils is not built",
)
@pytest.mark.parametrize("name", list(TORCHS))
def test_what_has_no_form_is_torchs_own(name: str) -> None:
    """An operator that ORT computes wrong, or without a gradient, equals eager as torch's."""
    compare(TORCHS[name])


@pytest.mark.parametrize(
    "name", ["an exponent that learns", "cosine of nothing", "a negative slope"]
)
def test_refused_where_nothing_may_be_torchs(name: str) -> None:
    """`torch_operators: off` raises an error instead of a wrong value."""
    with pytest.raises(
        Exception, match=r"is another one in ONNX Runtime than in torch.*torch_operators='auto'"
    ):
        compare(TORCHS[name], torch_operators="off")
