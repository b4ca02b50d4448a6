"""Task reranker: a score for each pair of a query and a document, and losses of scores.

The losses are sentence-transformers' of the same names (version 6.2).
Shapes: S samples, T documents of a sample, L tokens.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional

from ortlaunch.recipe import Recipe
from ortlaunch.worker.model.text_loss_module import TextLossModule


class PairScorer(nn.Module):
    """A classifier of transformers with one class: (pairs, L) tokens to (pairs,) scores."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Tensor:
        scores: Tensor = self.model(**inputs).logits[:, 0]
        return scores


class RerankerLossModule(TextLossModule):
    """The loss of a model's scores, by `model.reranker`."""

    output_name = "scores"

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        super().__init__(model, PairScorer(model))
        settings = recipe.model.text_comparison
        assert settings is not None
        self.loss_traits = settings.traits
        self._loss_of_scores = _LOSSES[settings.loss]
        self.needed_values = ("input_ids", "attention_mask", "labels")

    def loss_of_outputs(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return self._loss_of_scores(outputs, batch["labels"].to(outputs.dtype))


def _listnet_loss(scores: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(scores, labels.softmax(1))


def _margin_error_loss(scores: Tensor, margins: Tensor) -> Tensor:
    return functional.mse_loss(scores[:, :1] - scores[:, 1:], margins)


_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "binary-cross-entropy": functional.binary_cross_entropy_with_logits,
    "mse": functional.mse_loss,
    "listnet": _listnet_loss,
    "margin-mse": _margin_error_loss,
}
