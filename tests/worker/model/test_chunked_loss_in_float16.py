"""A chunked loss in ONNX Runtime's graph of a float16 model."""

from __future__ import annotations

import copy

import torch
from torch import nn

from ortlaunch.worker.model.chunked_loss import chunked_cross_entropy
from ortmodule_tests.conftest import built
from ortmodule_tests.forks import Run, fresh_ort, servers
from ortmodule_tests.modules import cast_parameters_in_place, wrapped
from tests.ort import needs_ort

__all__ = ["built", "fresh_ort", "servers"]
pytestmark = [needs_ort]


class TwoLosses(nn.Module):
    """A chunked loss over a vocabulary, and another loss beside it, as BERT's pretraining has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(64, 32)
        self.head = nn.Linear(32, 64)
        self.pair = nn.Linear(32, 2)

    def forward(self, ids: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        hidden = self.words(ids).tanh()
        loss = chunked_cross_entropy(
            hidden.view(-1, 32), self.head.weight, self.head.bias, ids.view(-1), 5, self.training
        )
        return loss + self.pair(hidden[:, 0]).float().square().mean()


def two_losses() -> None:
    """Compare loss and gradients of a float16 graph with those of eager in float32."""
    model = TwoLosses()
    ids = torch.arange(24).reshape(3, 8) * 5 % 64
    half = copy.deepcopy(model)
    cast_parameters_in_place(half, torch.float16)
    loss = wrapped(half)(ids, ids)
    expected = model(ids, ids)
    loss.backward()
    expected.backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=2e-3, atol=0)
    theirs = [parameter.grad for parameter in model.parameters()]
    ours = [parameter.grad for parameter in half.parameters()]
    for half_gradient, gradient in zip(ours, theirs):
        assert half_gradient is not None
        torch.testing.assert_close(half_gradient.float(), gradient, rtol=2e-2, atol=2e-4)


def test_a_chunked_loss_is_float32_in_a_float16_graph(built: None, fresh_ort: Run) -> None:
    """A chunked loss is added to another loss in float32; loss and gradients are eager's."""
    # In a fresh process: ORT keeps the gradient of an operator that an export in float32 registered.
    done = fresh_ort(
        "from tests.worker.model import test_chunked_loss_in_float16 as test; test.two_losses()"
    )
    assert done.returncode == 0, done.stderr[-3000:]
