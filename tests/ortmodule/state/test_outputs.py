"""Outputs of an ORTModule have the dtypes of the model's outputs."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.ort import needs_ort
from tests.ortmodule.modules import wrapped

pytestmark = [needs_ort, pytest.mark.usefixtures("built", "seeded")]

# Results that are not float32.
FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "asked of softmax": lambda x: functional.softmax(x, -1, dtype=torch.float16),
    "softmax of half": lambda x: x.half().softmax(-1),
    "log_softmax": lambda x: functional.log_softmax(x, -1, dtype=torch.float16),
    "whole numbers": lambda x: x.argmax(-1),
}


class Formed(nn.Module):
    """A layer's output in one form, and unchanged."""

    def __init__(self, form: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.form = form

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.layer(x)
        return self.form(hidden), hidden


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("training", [True, False])
def test_types_are_eagers(form: str, training: bool) -> None:
    """Outputs have eager's dtypes, also float16 on a CPU."""
    model = Formed(FORMS[form]).train(training)
    eager = copy.deepcopy(model)
    module = wrapped(model)
    x = torch.randn(3, 4)
    with torch.set_grad_enabled(training):
        ours = module(x)
        theirs = eager(x)
    assert [output.dtype for output in ours] == [output.dtype for output in theirs]
    # On a CPU, ONNX Runtime computes float16 in float32, so results differ by float16's rounding.
    torch.testing.assert_close(ours[0], theirs[0], rtol=2e-3, atol=1e-3)
    if training:
        for formed, hidden in (ours, theirs):
            (formed.float().square().sum() + hidden.sum()).backward()
        torch.testing.assert_close(
            model.layer.weight.grad, eager.layer.weight.grad, rtol=2e-3, atol=1e-2
        )
