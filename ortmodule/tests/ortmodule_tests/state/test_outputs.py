"""Outputs of an ORTModule have the dtypes of the model's outputs, and stay as they are."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from ortmodule_tests.modules import same, training_graph, wrapped
from ortmodule_tests.ort import needs_ort

pytestmark = [needs_ort, pytest.mark.usefixtures("built", "seeded")]

# Results that are not float32.
FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "asked of softmax": lambda x: functional.softmax(x, -1, dtype=torch.float16),
    "softmax of half": lambda x: x.half().softmax(-1),
    "relu of half": lambda x: x.half().relu(),
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


# Values that a loss uses, and that ONNX Runtime keeps in memory of other values.
USED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "probabilities": lambda x: x.softmax(-1),
    "scores": lambda x: x.tanh().reshape(-1),
    "part": lambda x: x.split(1, -1)[0].squeeze(-1),
    "whole numbers": lambda x: x.double().mul(3).long(),
    "truths": lambda x: x > 0,
    "number": lambda x: x.square().mean().sqrt(),
}


class Returning(nn.Module):
    """A model that returns its loss and a value that the loss is computed of."""

    def __init__(self, form: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.form = form

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        value = self.form(self.layers[0](x))
        other = self.layers[2](self.layers[1](x)).tanh()
        return value.float().square().mean() + other.square().mean(), value


@pytest.mark.parametrize("used", USED)
def test_the_backward_pass_changes_no_output(used: str) -> None:
    """A value beside the loss equals that of eager before and after the backward pass."""
    model = Returning(USED[used])
    x = torch.randn(32, 64)
    expected = model(x)[1]
    loss, value = wrapped(model)(x)
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
    before = value.clone()
    loss.backward()
    assert torch.equal(value, before)
    assert value.dtype == expected.dtype


def test_an_output_that_only_leaves_the_graph_is_not_copied() -> None:
    """Scores that torch computes, and values that the loss does not use, take no second memory."""

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            scores = self.layer(x)
            return functional.cross_entropy(scores, x.argmax(-1)), scores, (x * 2).tanh()

    module = wrapped(Plain())
    module(torch.randn(32, 64))[0].backward()
    returned = next(node for node in training_graph(module).node if node.op_type == "YieldOp").input
    assert len(returned) == 3
    assert "_ortmodule_" not in " ".join(returned)


# Outputs that do not depend on the values of the batch or of a weight.
CONSTANTS: dict[str, Callable[[torch.Tensor], object]] = {
    "number": lambda x: 3,
    "truth": lambda x: True,
    "size": lambda x: x.shape[0],
    "zeros": lambda x: torch.zeros(1),
    "scalar": lambda x: torch.tensor(0.5),
    "computed": lambda x: torch.arange(4).float().cumsum(0),
    "empty": lambda x: torch.zeros(0, 2),
}


class WithConstant(nn.Module):
    """A layer's output beside a constant, in which a loss of another model would be."""

    def __init__(self, constant: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.constant = constant

    def forward(self, x: torch.Tensor) -> dict[str, object]:
        return {"auxiliary": self.constant(x), "loss": self.layer(x).square().mean()}


# ORT warns of every number, also among the outputs.
@pytest.mark.filterwarnings("ignore:Received input of type")
@pytest.mark.parametrize("form", CONSTANTS)
def test_a_constant_is_an_output(form: str) -> None:
    """Each pass returns the constant, a number as a tensor, and has eager's gradients."""
    model = WithConstant(CONSTANTS[form])
    eager = copy.deepcopy(model)
    module = wrapped(model)
    for size in (3, 2):
        x = torch.randn(size, 4)
        ours = module(x)
        theirs = eager(x)
        torch.testing.assert_close(ours["auxiliary"], torch.as_tensor(theirs["auxiliary"]))
        ours["loss"].backward()
        theirs["loss"].backward()
    same(model, eager)


class WithoutGradients(nn.Module):
    """A layer's output beside several outputs that depend on no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        hidden = self.layer(x)
        return [x.exp(), hidden, hidden.detach().sin(), torch.zeros(1), x.argmax(-1)]


def test_outputs_without_a_gradient_have_none() -> None:
    """Several outputs have no gradient; a loss of all outputs has eager's gradients."""
    # ORT marked the last of them alone, and the backward pass of such a loss failed.
    model = WithoutGradients()
    eager = copy.deepcopy(model)
    x = torch.randn(3, 4)
    outputs = wrapped(model)(x), eager(x)
    marks = [[output.requires_grad for output in each] for each in outputs]
    assert marks == [[False, True, False, False, False]] * 2
    for each in outputs:
        torch.stack([output.float().square().sum() for output in each]).sum().backward()
    same(model, eager)
