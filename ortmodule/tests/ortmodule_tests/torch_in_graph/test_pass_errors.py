"""Values that torch refuses end a pass as in eager PyTorch: its exception, one line, the model's line."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ortmodule_tests.modules import wrapped
from ortmodule_tests.ort import needs_ort

pytestmark = [needs_ort, pytest.mark.usefixtures("built")]


class Scored(nn.Module):
    """Scores of four classes, and what a program makes of them and of labels."""

    def __init__(self, program: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scores, self.table = nn.Linear(8, 4), nn.Embedding(4, 2)
        self.program = program

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.program(self, self.scores(x), y)


def weighted(model: Any, z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(z, y, torch.tensor([1.0, 2.0, 0.0, 1.0]))


# A program, and a label that torch refuses.
PROGRAMS: dict[str, tuple[Any, int]] = {
    "cross entropy": (lambda m, z, y: F.cross_entropy(z, y), 7),
    "with weights": (weighted, 4),
    "of pixels": (lambda m, z, y: F.cross_entropy(z[..., None, None], y[:, None, None]), 4),
    "one_hot": (lambda m, z, y: (F.one_hot(y, 4) * z.log_softmax(-1)).sum(), 4),
    "a negative class": (lambda m, z, y: (F.one_hot(y, 4) * z.log_softmax(-1)).sum(), -1),
    "gather": (lambda m, z, y: z.gather(1, y[:, None]).sum(), -1),
    "an embedding": (lambda m, z, y: m.table(y).sum() + z.sum(), 4),
    "two indices": (lambda m, z, y: z[torch.arange(y.shape[0]), y].sum(), 5),
    "one index": (lambda m, z, y: z[:, y].sum(), 9),
    "index_select": (lambda m, z, y: z.index_select(1, y).sum(), -1),
    "scatter": (lambda m, z, y: z.scatter(1, y[:, None], 2.0).sum(), -1),
    "integers by 0": (lambda m, z, y: z.sum() * (6 // (y + 1)).sum(), -1),
}
GOOD = torch.tensor([0, 1, 3])


def bad(label: int) -> torch.Tensor:
    return torch.tensor([label, 1, 0])


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_value_out_of_range_ends_as_in_eager(name: str) -> None:
    """The exception's type is eager's; its only line names the model's line."""
    program, label = PROGRAMS[name]
    eager = Scored(program)
    ours = wrapped(copy.deepcopy(eager))
    x = torch.randn(3, 8)
    torch.testing.assert_close(ours(x, GOOD), eager(x, GOOD))
    with pytest.raises((IndexError, RuntimeError)) as expected:
        eager(x, bad(label))
    with pytest.raises(expected.type, match=f"{__file__}:") as found:
        ours(x, bad(label))
    text = str(found.value)
    assert (found.type, "\n" in text, "onnxruntime_src" in text) == (expected.type, False, False)
    if name == "an embedding":
        assert text.startswith(f"index out of range in self, in layer table at {__file__}:")
    # The graph is as it was.
    torch.testing.assert_close(ours(x, GOOD), eager(x, GOOD))


@pytest.mark.parametrize("name", ["cross entropy", "with weights", "gather"])
def test_evaluation_checks_values_too(name: str) -> None:
    """An evaluation graph refuses what eager PyTorch refuses, and is nan where that is nan."""
    program, label = PROGRAMS[name]
    eager = Scored(program).eval()
    ours = wrapped(copy.deepcopy(eager))
    x = torch.randn(3, 8)
    with torch.no_grad():
        torch.testing.assert_close(ours(x, GOOD), eager(x, GOOD))
        # ONNX Runtime's own kernel would read memory behind the scores.
        with pytest.raises((IndexError, RuntimeError), match=f"out of bounds.* at {__file__}:"):
            ours(x, bad(label))
        if name != "gather":
            assert ours(x, torch.full((3,), -100)).isnan()


def test_labels_without_weight_are_no_loss_of_zero() -> None:
    """Class weights that are all 0 make a mean of nan, as in eager PyTorch, and equal gradients."""
    eager = Scored(weighted)
    model = copy.deepcopy(eager)
    ours = wrapped(model)
    x = torch.randn(3, 8)
    for y in (GOOD, torch.tensor([2, 2, -100])):
        losses = []
        for each in (ours, eager):
            each.zero_grad()
            losses.append(each(x, y))
            losses[-1].backward()
        torch.testing.assert_close(losses[0], losses[1], equal_nan=True)
        torch.testing.assert_close(
            model.scores.weight.grad, eager.scores.weight.grad, equal_nan=True
        )


class Failing(torch.autograd.Function):
    """A custom function whose backward pass fails."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise KeyError("planted")


def test_an_error_of_a_custom_function_is_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    """The exception of a custom function arrives as it is, and nothing else is printed."""
    # The backward pass runs in C++, which would print the traceback.
    loss = wrapped(Scored(lambda m, z, y: Failing.apply(z).sum()))(torch.randn(3, 8), GOOD)
    capfd.readouterr()
    with pytest.raises(KeyError, match="planted"):
        loss.backward()
    assert "planted" not in "".join(capfd.readouterr())
