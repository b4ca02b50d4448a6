"""`engine.chunked_loss`: whether a model's head and loss are made in chunks, and how its forward pass then goes.

The model runs without labels, its last linear layer handing on what it is given; head and mean cross entropy come after
(chunked_loss.py). Applied only where that is the model's own loss: tried on a few tokens before anything is trained.
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

from ortlaunch.planning.memory import chunk_rows
from ortlaunch.recipe import Recipe
from ortlaunch.run_folder.engine_report import ChunkedLoss
from ortlaunch.worker.model.chunked_loss import IGNORED, chunked_loss
from ortlaunch.worker.model.matmul_precision import matmul_precision

Batch = Mapping[str, Tensor]
_TOKENS = 16  # of the trial
_TOLERANCE = 1e-5
LABELS = ("labels", "next_sentence_label")


@dataclass(frozen=True)
class ChunkedHead:
    """A model's head, by its name in the model, and the rows of a chunk."""

    name: str
    rows: int
    shifted: bool
    """Each row's label is that of the token after it."""

    def loss(self, model: nn.Module, batch: Batch, training: bool) -> tuple[Tensor, Any]:
        """The model's loss of a batch, and what it returned without labels; its head must be `open`."""
        output = model(**{name: value for name, value in batch.items() if name not in LABELS})
        hidden = _before_head(output)
        labels = batch["labels"]
        if self.shifted:
            labels = functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
        head = cast(nn.Linear, model.get_submodule(self.name))
        train = torch.is_grad_enabled() or (
            training and torch.jit.is_tracing()
        )  # an export is made without gradients
        rows = hidden.reshape(-1, head.weight.shape[1])
        loss = chunked_loss(rows, head.weight, head.bias, labels.reshape(-1), self.rows, train)
        pairs = batch.get("next_sentence_label")
        if pairs is None:
            return loss, output
        scores = output.seq_relationship_logits
        return loss + functional.cross_entropy(
            scores.view(-1, scores.shape[-1]), pairs.view(-1)
        ), output

    def logits(self, model: nn.Module, rows: Tensor) -> Tensor:
        """Of these rows that go into the head, which is `open`."""
        head = cast(nn.Linear, model.get_submodule(self.name))
        return functional.linear(rows, head.weight, head.bias)

    def open(self, model: nn.Module) -> None:
        """Let the head hand on what goes into it."""
        model.get_submodule(self.name).forward = _handed_on

    def close(self, model: nn.Module) -> None:
        """Give the model its own head back."""
        vars(model.get_submodule(self.name)).pop("forward", None)


def _handed_on(hidden: Tensor) -> Tensor:
    return hidden


def _before_head(output: Any) -> Tensor:
    found: Tensor = (
        output.prediction_logits if hasattr(output, "prediction_logits") else output.logits
    )
    return found


def chunk_head(recipe: Recipe, module: Any, sample: Batch, device: str) -> ChunkedLoss:
    """Chunk the loss of a LossModule, still in float32, where the recipe and the model let it.

    sample: a micro batch. device: type of the one that trains. Returns what engine.json says: rows a chunk, or null and
    why.
    """
    asked = recipe.engine.chunked_loss
    why = _why_not(recipe, module.model, sample)
    if why:
        return ChunkedLoss(asked, None, why)
    head = module.model.get_output_embeddings()
    labels = sample["labels"].numel()
    vocabulary = len(head.weight)
    rows = chunk_rows(asked, labels, vocabulary, device)
    if not rows:
        return ChunkedLoss(asked, None, f"logits of {labels:,} x {vocabulary:,} are small")
    name = next(name for name, each in module.model.named_modules() if each is head)
    chunked = ChunkedHead(name, rows, shifts(module.model))
    why = _tried(module, chunked, sample)
    module.chunk(None if why else chunked)
    return ChunkedLoss(asked, None if why else rows, why)


def _why_not(recipe: Recipe, model: nn.Module, sample: Batch) -> str | None:
    """What can be known without a pass."""
    if recipe.engine.chunked_loss == "off":
        return "off"
    if not recipe.model.traits.predicts:
        return f"task {recipe.model.task} has no head over a vocabulary"
    if recipe.zero and recipe.zero.stage == 3:
        return "ZeRO 3 keeps the head's weight in pieces"
    if not {"labels", "input_ids"} <= sample.keys():
        return "a batch has no input_ids and labels"
    get: Any = getattr(model, "get_output_embeddings", lambda: None)
    head = get()
    if type(head) is not nn.Linear:
        return (
            "the model has no head"
            if head is None
            else f"the head is a {type(head).__name__}, no plain linear layer"
        )
    cap = getattr(getattr(model, "config", None), "final_logit_softcapping", None)
    return f"the model caps its logits (final_logit_softcapping: {cap:g})" if cap else None


def shifts(model: nn.Module) -> bool:
    """Whether the model compares each score with the label after it, as transformers' causal models do."""
    return any(
        type(module).__name__.endswith(("ForCausalLM", "LMHeadModel")) for module in model.modules()
    )


def _tried(module: Any, chunked: ChunkedHead, sample: Batch) -> str | None:
    """Why the chunked loss is not this model's own; None where a few tokens have the same."""
    try:
        tokens = _few_tokens(sample, next(module.parameters()).device)
        with _evaluating(module), matmul_precision("highest"):
            whole = float(module(**tokens))
            module.chunk(chunked)
            ours = float(module(**tokens))
    except Exception as error:  # whatever a model raises that is called in another way
        module.chunk(None)
        return f"a trial without the model's head failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if math.isnan(whole):
        return "its loss of a few tokens is nan"
    if abs(ours - whole) <= _TOLERANCE * max(1.0, abs(whole)):
        return None
    return f"the model's loss is not the mean cross entropy of its head: {whole:.6g}, and that is {ours:.6g}"


def _few_tokens(sample: Batch, device: torch.device) -> dict[str, Tensor]:
    """The first tokens of a batch, with themselves for labels, but one that is ignored."""
    shape = sample["input_ids"].shape
    tokens = {
        name: (value[:1, :_TOKENS] if value.shape[:2] == shape else value[:1]).to(device)
        for name, value in sample.items()
    }
    tokens["labels"] = tokens["input_ids"].clone()
    tokens["labels"][0, -1] = IGNORED
    return tokens


@contextlib.contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    modes = [(each, each.training) for each in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for each, training in modes:
            each.training = training
