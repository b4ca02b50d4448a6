"""Small programs of public bug reports: on ONNX Runtime they have eager's values and gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ortmodule_tests.modules import same, wrapped
from ortmodule_tests.ort import needs_ort

pytestmark = [needs_ort, pytest.mark.usefixtures("built", "seeded")]
Program = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]


def put(of: torch.Tensor, where: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    of = of * 1
    of[where] = values
    return of


# What a model makes of the output z of its layer, and of a mask of z.
SELECTIONS: dict[str, Program] = {
    "assign": lambda m, z, mask: put(z, mask, z[mask] * 2).sum(),
    "sigmoid": lambda m, z, mask: put(torch.zeros_like(z), mask, z[mask].sigmoid()).sum() + z.sum(),
    "mean of a dimension": lambda m, z, mask: z[mask[:, 0]].mean(1).sum() + z.sum(),
    "variance": lambda m, z, mask: z[mask[:, 0]].var(1).sum() + z.sum(),
    "linear": lambda m, z, mask: m.layer(z[mask[:, 0]]).sum() + z.sum(),
    "rows": lambda m, z, mask: put(z, mask[:, 0], m.layer(z)[mask[:, 0]]).sum(),
    "mean": lambda m, z, mask: z[mask].mean().nan_to_num() + z.sum(),
    "cross entropy": lambda m, z, mask: (
        F.cross_entropy(z[mask[:, 0]], torch.zeros(4).long()[mask[:, 0]]).nan_to_num() + z.sum()
    ),
    "its sum": lambda m, z, mask: (
        F.cross_entropy(z[mask[:, 0]], torch.zeros(4).long()[mask[:, 0]], reduction="sum") + z.sum()
    ),
}


class Selecting(nn.Module):
    """A layer, and a program behind the places where its output is above a threshold."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.program = program

    def forward(self, x: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
        # The threshold is an argument, so that one graph selects something and nothing.
        z = self.layer(x)
        return self.program(self, z, z > threshold)


# The variance of nothing; eager PyTorch warns, too.
@pytest.mark.filterwarnings("ignore:var:UserWarning")
@pytest.mark.parametrize("name", SELECTIONS)
def test_nothing_above_a_threshold(name: str) -> None:
    """A batch of which nothing is selected, as the second one or the first, in both modes."""
    eager = Selecting(SELECTIONS[name])
    model = copy.deepcopy(eager)
    ours = wrapped(model)
    x = torch.randn(4, 8)
    # A crash was seen in the second batch, and wrong values after it.
    for threshold in (0.0, 100.0, 0.0):
        losses = [each(x, torch.tensor(threshold)) for each in (ours, eager)]
        torch.testing.assert_close(*losses)
        for loss in losses:
            loss.backward()
    same(model, eager, atol=1e-5)
    for each in (ours, eager):
        each.eval()
    with torch.no_grad():
        # The first batch of the evaluation's graph selects nothing.
        for threshold in (100.0, 0.0):
            torch.testing.assert_close(
                *(each(x, torch.tensor(threshold)) for each in (ours, eager))
            )


class Asking(torch.autograd.Function):
    """A product whose backward pass asks whether the weight needs a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, otherwise: Any) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.otherwise = otherwise
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        found = gradient.T @ x if weight.requires_grad else ctx.otherwise
        return gradient @ weight, found, None


@pytest.mark.parametrize("otherwise", [0.0, 0.5, None], ids=["zeros", "half", "nothing"])
def test_a_function_that_asks_for_gradients(otherwise: Any) -> None:
    """Tensors that a function saves keep `requires_grad`: its weight trains as in eager."""

    class Net(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            # No other operator takes this weight.
            self.w = nn.Parameter(torch.randn(4, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            other = None if otherwise is None else otherwise * torch.ones(4, 8)
            return Asking.apply(super().forward(x).tanh(), self.w, other).square().mean()

    eager = Net()
    model = copy.deepcopy(eager)
    for each in (eager, wrapped(model)):
        each(torch.ones(2, 8)).backward()
    assert eager.w.grad.norm() > 0.1
    same(model, eager)


@pytest.fixture
def fused() -> Iterator[None]:
    """Turn eager's fused attention on, which makes nested tensors."""
    torch.backends.mha.set_fastpath_enabled(True)
    yield
    torch.backends.mha.set_fastpath_enabled(False)


@pytest.mark.usefixtures("fused")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("nested", [True, False])
def test_padding_of_an_encoder_in_evaluation(nested: bool) -> None:
    """The padding's places are those of eager PyTorch, with nested tensors and without."""
    layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).eval()
    x = torch.randn(3, 8, 16)
    # Nested tensors keep the tokens alone; eager fills the rest with zeros.
    padding = torch.arange(8) >= torch.tensor([8, 5, 3])[:, None]
    with torch.no_grad():
        expected = encoder(x, src_key_padding_mask=padding)
        found = wrapped(encoder)(x, src_key_padding_mask=padding)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


class Words(nn.Module):
    """A model of words whose loss of nothing is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(50, 32), nn.Linear(32, 50)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.head(self.words(input_ids).tanh())
        return {"loss": F.cross_entropy(scores.flatten(0, 1), labels.flatten()).nan_to_num()}


@pytest.mark.parametrize(
    "family",
    ["own", pytest.param("bert", marks=pytest.mark.slow), "llama"],
)
def test_labels_that_are_all_ignored(family: str) -> None:
    """The loss of such a batch is eager's, nan included, and the batches after it are right."""
    pytest.importorskip("transformers")
    from transformers import AutoConfig, BertForMaskedLM, LlamaForCausalLM

    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
             "intermediate_size": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # fmt: skip
    models = {"bert": BertForMaskedLM, "llama": LlamaForCausalLM}
    eager: nn.Module = Words()
    if family in models:
        eager = models[family](AutoConfig.for_model(family, **sizes, use_cache=False))
    model = copy.deepcopy(eager)
    ours = wrapped(model)
    for training in (True, False):
        # In the second batch every label is ignored.
        for share in (0.3, 0.0, 0.5):
            ids = torch.randint(0, 50, (4, 16))
            labels = torch.where(torch.rand(4, 16) < share, ids, -100)
            losses = []
            for each in (ours, eager):
                each.zero_grad()
                each.train(training)
                with torch.set_grad_enabled(training):
                    losses.append(each(input_ids=ids, labels=labels)["loss"])
            torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5, equal_nan=True)
            assert losses[1].isnan() == (share == 0.0 and family != "own")
            # Gradients of nan are eager's by pass_errors' tests.
            if training and share:
                for loss in losses:
                    loss.backward()
                same(model, eager, atol=1e-5)
