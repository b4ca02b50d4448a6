"""Grouped convolutions on ONNX Runtime's CPU: their gradients stay inside their own memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from ortmodule._internal.torch_in_graph import torch_kernels
from ortmodule_tests.modules import same, wrapped
from ortmodule_tests.ort import needs_ort

pytestmark = [needs_ort, pytest.mark.usefixtures("built", "seeded")]


class Stack(nn.Module):
    """Four convolutions of the same width, with other weights around them in memory."""

    def __init__(self, kernel: int, **settings: Any) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.last = nn.LazyLinear(12)
        layers = [nn.Conv1d(16, 16, kernel, padding=kernel // 2, **settings) for _ in range(4)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return self.last(hidden).square().mean()


# Kernel and arguments of Conv1d.
SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "pointwise": (1, {"groups": 4}),
    "depthwise": (3, {"groups": 16}),
    "dilated": (3, {"groups": 2, "dilation": 2, "bias": False}),
    "strided": (3, {"groups": 2, "stride": 2}),
}


@pytest.mark.parametrize("kind", list(SETTINGS))
def test_no_other_gradient_is_overwritten(kind: str) -> None:
    """Gradients of ten passes are eager's, also while later passes run; so is evaluation."""
    kernel, settings = SETTINGS[kind]
    model = Stack(kernel, **settings)
    x = torch.randn(3, 16, 12)
    model(x)
    eager = copy.deepcopy(model)
    module = wrapped(model)
    # Copies of every gradient: a later pass could overwrite it.
    held = []
    eager(x).backward()
    for _ in range(10):
        model.zero_grad()
        module(x).backward()
        same(model, eager)
        held.append(
            [
                (parameter.grad, parameter.grad.clone())
                for parameter in model.parameters()
                if parameter.grad is not None
            ]
        )
    assert all(
        torch.equal(gradient, copied) for gradients in held for gradient, copied in gradients
    )
    torch.testing.assert_close(module.eval()(x), eager.eval()(x))


def test_three_dimensions_are_refused() -> None:
    """A Conv3d with groups is refused; one without groups runs."""
    x = torch.randn(2, 4, 3, 3, 3)
    module = wrapped(nn.Conv3d(4, 4, 2))
    module(x).sum().backward()
    with pytest.raises(Exception, match="Conv3d with groups"):
        # "off", or torch would compute the convolution inside the graph.
        wrapped(nn.Conv3d(4, 4, 2, groups=2), torch_operators="off")(x)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
def test_the_same_size() -> None:
    """The weight's gradient with padding="same" is eager's, also if the two ends differ."""
    model = nn.Sequential(
        # A kernel of 2 pads one end only.
        nn.Conv2d(4, 4, (3, 2), padding="same"),
        nn.Conv2d(4, 4, 3, padding="same", dilation=2),
    )
    eager = copy.deepcopy(model)
    module = wrapped(model)
    x = torch.randn(2, 4, 9, 8)
    for given in (module, eager):
        given(x).square().mean().backward()
    same(model, eager)


def test_onnx_runtimes_own_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """So are those of ORT's kernel, which convolutions with other padding at each end use."""
    monkeypatch.setattr(
        torch_kernels, "_add_torch_conv_or_gradient_if_evenly_padded", lambda graph, node: False
    )
    test_no_other_gradient_is_overwritten("pointwise")
