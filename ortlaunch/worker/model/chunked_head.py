"""`engine.chunked_loss`: whether head and loss are computed in chunks, and the forward pass for it.

The model runs without labels, and its last linear layer returns its input unchanged. Head and mean
cross entropy follow in chunks (chunked_loss.py). This is applied only if the result is the model's
own loss, which is tested on a few tokens before training.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ortlaunch.recipe import Recipe
from ortlaunch.recipe.rules.loss_chunks import loss_chunk_rows_or_zero
from ortlaunch.run_folder.engine_report import ChunkedLoss
from ortlaunch.worker.model.chunked_loss import IGNORED, chunked_cross_entropy
from ortlaunch.worker.model.matmul_precision import use_matmul_precision

BatchMapping = Mapping[str, Tensor]
# Tokens of the test.
_TOKENS = 16
# Relative to the loss, or absolute where the loss is below 1.
_TOLERANCE = 1e-5
LABELS = ("labels", "next_sentence_label", "start_positions", "end_positions")


@dataclass(frozen=True)
class ChunkedHead:
    """A model's head, by its name in the model, and the rows of a chunk."""

    name: str
    rows: int
    shifted: bool
    """Whether the label of each row is the label of the next token."""

    def chunked_loss_and_output(
        self, model: nn.Module, batch: BatchMapping, is_training: bool
    ) -> tuple[Tensor, Any]:
        """Return the loss of a batch and the model's output without labels.

        The head must be open (see `open`).
        """
        output = model(**{name: value for name, value in batch.items() if name not in LABELS})
        hidden = _head_input(output)
        labels = batch["labels"]
        if self.shifted:
            labels = functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
        head = cast(nn.Linear, model.get_submodule(self.name))
        # An export of a training graph runs without gradients, but its graph must compute them.
        needs_gradients = torch.is_grad_enabled() or (is_training and torch.jit.is_tracing())
        rows = hidden.reshape(-1, head.weight.shape[1])
        loss = chunked_cross_entropy(
            rows, head.weight, head.bias, labels.reshape(-1), self.rows, needs_gradients
        )
        pairs = batch.get("next_sentence_label")
        if pairs is None:
            return loss, output
        scores = output.seq_relationship_logits
        return loss + functional.cross_entropy(
            scores.view(-1, scores.shape[-1]), pairs.view(-1)
        ), output

    def logits_of_head_inputs(self, model: nn.Module, head_inputs: Tensor) -> Tensor:
        """Return the logits of rows of the head's input; the head must be open (see `open`)."""
        head = cast(nn.Linear, model.get_submodule(self.name))
        return functional.linear(head_inputs, head.weight, head.bias)

    def replace_head_by_identity(self, model: nn.Module) -> None:
        """Make the head return its input unchanged."""
        model.get_submodule(self.name).forward = _return_unchanged

    def restore_head(self, model: nn.Module) -> None:
        """Restore the model's own head."""
        vars(model.get_submodule(self.name)).pop("forward", None)


def _return_unchanged(hidden: Tensor) -> Tensor:
    return hidden


def _head_input(output: Any) -> Tensor:
    head_input: Tensor = (
        output.prediction_logits if hasattr(output, "prediction_logits") else output.logits
    )
    return head_input


def chunk_head_if_trial_agrees_and_describe(
    recipe: Recipe, loss_module: Any, sample_batch: BatchMapping, device_type: str
) -> ChunkedLoss:
    """Chunk the loss of a LossModule if the recipe and the model permit it.

    Args:
        recipe: the run's recipe.
        loss_module: the LossModule, still in float32.
        sample_batch: a micro batch.
        device_type: the type of the device that trains.

    Returns:
        The record for engine.json: the rows of a chunk, or null and the reason.
    """
    requested = recipe.engine.chunked_loss
    reason = _reason_loss_is_not_chunked_or_none(recipe, loss_module.model, sample_batch)
    if reason:
        return ChunkedLoss(requested, None, reason)
    head = loss_module.model.get_output_embeddings()
    labels = sample_batch["labels"].numel()
    vocabulary = len(head.weight)
    rows = loss_chunk_rows_or_zero(requested, labels, vocabulary, device_type)
    if not rows:
        return ChunkedLoss(requested, None, f"logits of {labels:,} x {vocabulary:,} are small")
    name = next(name for name, layer in loss_module.model.named_modules() if layer is head)
    chunked = ChunkedHead(name, rows, predicts_next_token(loss_module.model))
    # A rank without weights takes the result of the ranks that have them.
    reason = (
        None
        if head.weight.is_meta
        else _chunk_head_and_reason_trial_failed_or_none(loss_module, chunked, sample_batch)
    )
    loss_module.chunk_head_or_restore_it(None if reason else chunked)
    return ChunkedLoss(requested, None if reason else rows, reason)


def _reason_loss_is_not_chunked_or_none(
    recipe: Recipe, model: nn.Module, sample_batch: BatchMapping
) -> str | None:
    """Return why the loss cannot be chunked, as far as that is known without a forward pass."""
    if recipe.engine.chunked_loss == "off":
        return "off"
    if not recipe.model.traits.predicts:
        return f"task {recipe.model.task} has no output layer over a vocabulary"
    if recipe.output_layer_sharding:
        return f"{recipe.output_layer_sharding} shards the weight of the output layer"
    if not {"labels", "input_ids"} <= sample_batch.keys():
        return "a batch has no input_ids and labels"
    get: Any = getattr(model, "get_output_embeddings", lambda: None)
    head = get()
    if type(head) is not nn.Linear:
        return (
            "the model has no output layer"
            if head is None
            else f"the output layer is a {type(head).__name__}, not a plain linear layer"
        )
    cap = getattr(getattr(model, "config", None), "final_logit_softcapping", None)
    return f"the model caps its logits (final_logit_softcapping: {cap:g})" if cap else None


def predicts_next_token(model: nn.Module) -> bool:
    """Return whether the model compares each score with the next label.

    Causal models of transformers do.
    """
    return any(
        type(module).__name__.endswith(("ForCausalLM", "LMHeadModel")) for module in model.modules()
    )


def _chunk_head_and_reason_trial_failed_or_none(
    loss_module: Any, chunked_head: ChunkedHead, sample_batch: BatchMapping
) -> str | None:
    """Return why the chunked loss is not the model's own; None if they agree on a few tokens."""
    try:
        tokens = _first_tokens_as_labelled_batch(
            sample_batch, next(loss_module.parameters()).device
        )
        with (
            _evaluation_mode_without_gradients_until_end(loss_module),
            use_matmul_precision("highest"),
        ):
            model_loss = float(loss_module(**tokens))
            loss_module.chunk_head_or_restore_it(chunked_head)
            chunked_value = float(loss_module(**tokens))
    # A model that is called in an unusual way may raise any exception: it is then not chunked.
    except Exception as error:
        loss_module.chunk_head_or_restore_it(None)
        return (
            f"a trial without the model's output layer failed: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:200]}"
        )
    if math.isnan(model_loss):
        return "its loss of a few tokens is nan"
    if abs(chunked_value - model_loss) <= _TOLERANCE * max(1.0, abs(model_loss)):
        return None
    return (
        f"the model's loss is not the mean cross entropy of its head: {model_loss:.6g}, "
        f"and that is {chunked_value:.6g}"
    )


def _first_tokens_as_labelled_batch(
    sample_batch: BatchMapping, device: torch.device
) -> dict[str, Tensor]:
    """Return the first tokens of a batch, with the same tokens as labels; one label is ignored."""
    shape = sample_batch["input_ids"].shape
    tokens = {
        name: (value[:1, :_TOKENS] if value.shape[:2] == shape else value[:1]).to(device)
        for name, value in sample_batch.items()
    }
    tokens["labels"] = tokens["input_ids"].clone()
    tokens["labels"][0, -1] = IGNORED
    return tokens


@contextlib.contextmanager
def _evaluation_mode_without_gradients_until_end(module: nn.Module) -> Iterator[None]:
    modes = [(layer, layer.training) for layer in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for layer, training in modes:
            layer.training = training
