"""The loss of tasks whose samples are several texts: the parts that embedding and reranker share.

Shapes: S samples, T texts (or pairs of texts) of a sample, L tokens, W values of a vector.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ortlaunch.base.errors import InputError
from ortlaunch.tables.text_losses import TextLoss
from ortlaunch.worker.allocator import trim_heap
from ortlaunch.worker.model.model import LossModule
from ortlaunch.worker.process_group.distributed import DistributedContext

_INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def _trim_heap_and_encode(encoder: nn.Module, **inputs: Tensor) -> Tensor:
    """Return the outputs of a part, computed without the memory that glibc kept of earlier parts."""
    # Aligned blocks seldom fit into freed ones: the heap grows with each part, to twice the memory.
    if inputs["input_ids"].device.type == "cpu":
        trim_heap()
    outputs: Tensor = encoder(**inputs)
    return outputs


class RowsOfRanks:
    """Gathers rows of all data-parallel ranks, once they are known."""

    def __init__(self) -> None:
        self.group: DistributedContext | None = None

    def gather(self, rows: Tensor) -> Tensor:
        """Return the rows of all ranks in rank order, with gradients to each rank's own."""
        return rows if self.group is None else self.group.gather_rows_with_gradients(rows)

    def largest_count(self, count: int) -> int:
        """Return the largest count of all ranks (collective)."""
        if self.group is None:
            return count
        return int(max(numbers[0] for numbers in self.group.gather_numbers([count])))

    @property
    def rank(self) -> int:
        """This rank among them."""
        return 0 if self.group is None else self.group.rank


class TextLossModule(LossModule):
    """A LossModule whose engine runs the model alone: the loss sees the texts of all ranks.

    `encode` turns (S x T, L) tokens into (S x T, ...) outputs. It is what ONNX Runtime or torch.compile
    runs; gathering over ranks and recomputing parts stay outside of the graph.
    """

    mini_batch: int | None = None
    """Texts of a pass; None: all."""

    def __init__(self, model: nn.Module, encoder: nn.Module) -> None:
        super().__init__(model)
        # Not registered, because its weights are those of `model`.
        self._encoders = [encoder]
        self.ranks = RowsOfRanks()

    def with_engine_of(self, wrap: Callable[[nn.Module], nn.Module]) -> TextLossModule:
        """Return a module with the same weights, whose model `wrap` puts on an engine."""
        on_engine = copy.copy(self)
        # A copy of the encoder, too: torch.compile works in place, and this module stays as it is.
        on_engine._encoders = [wrap(copy.copy(self._encoders[0]))]
        return on_engine

    def reason_for_another_export(self, **batch: Tensor) -> str:
        """Return why ORTModule would export another graph for this batch; "": it would not."""
        encoder: Any = self._encoders[0]
        reason: str = encoder.reason_for_another_export(**self._rows_of_texts(batch))
        return reason

    def join_ranks(self, group: DistributedContext) -> None:
        self.ranks.group = group

    @contextlib.contextmanager
    def compute_loss_of_own_rank(self) -> Iterator[None]:
        group, self.ranks.group = self.ranks.group, None
        try:
            yield
        finally:
            self.ranks.group = group

    def _rows_of_texts(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: batch[name].flatten(0, 1) for name in _INPUTS if name in batch}

    def outputs_of_texts(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the encoder's output for each text: (S, T, ...)."""
        rows = self._rows_of_texts(batch)
        encoder = self._encoders[0]
        # Dropout may have been switched since; an inner module does not hear of it.
        if encoder.training != self.training:
            encoder.train(self.training)
        inputs_of_parts = [
            dict(zip(rows, part))
            for part in zip(
                *(value.split(self.mini_batch or len(value)) for value in rows.values())
            )
        ]
        if self.mini_batch is not None and not self.training:
            # A pass of a divided model is collective, and ranks may have unequal batches.
            pass_count = self.ranks.largest_count(len(inputs_of_parts))
            for _ in range(pass_count - len(inputs_of_parts)):
                encoder(**inputs_of_parts[0])
        parts = []
        for inputs in inputs_of_parts:
            if self.mini_batch is None or not torch.is_grad_enabled():
                parts.append(encoder(**inputs))
            else:
                # Only the outputs are kept; the backward pass computes one part after another.
                parts.append(
                    checkpoint(_trim_heap_and_encode, encoder, use_reentrant=False, **inputs)
                )
        outputs = parts[0] if len(parts) == 1 else torch.cat(parts)
        by_sample: Tensor = outputs.unflatten(0, batch["input_ids"].shape[:2])
        return by_sample

    def _loss_or_dict_of_loss_and_values(
        self, batch: dict[str, Tensor]
    ) -> Tensor | dict[str, Tensor]:
        if missing := [name for name in self.needed_values if name not in batch]:
            raise InputError(
                f"a batch of this task lacks {', '.join(missing)}: custom samples have input_ids and "
                "attention_mask of (texts, length), and text_ids (texts,), equal for equal texts; or the "
                "labels that the loss needs"
            )
        self._require_shapes_of_custom_batch(batch)
        outputs = self.outputs_of_texts(batch)
        # Ranks may have unequal batches in an evaluation; metrics join the outputs of all ranks.
        with contextlib.nullcontext() if self.training else self.compute_loss_of_own_rank():
            loss = self._wide_loss_of_outputs(outputs, batch)
        if self.evaluates_with_scores and not self.training:
            return {"loss": loss, self.output_name: outputs}
        return loss

    def _require_shapes_of_custom_batch(self, batch: dict[str, Tensor]) -> None:
        """Refuse custom samples of another form.

        Raises:
            InputError: samples are single texts, or have not as many labels as the loss needs.
        """
        shape = tuple(batch["input_ids"].shape)
        if len(shape) != 3:
            raise InputError(
                f"a batch has input_ids of shape {shape}; it must be (samples, texts, length): a "
                "custom sample has (texts, length)"
            )
        label = self.loss_traits.label
        label_counts = {
            "score": (),
            "relevance": (shape[1],),
            "margins": (shape[1] - self.texts_without_margin,),
        }
        if label and batch["labels"].shape[1:] != label_counts[label]:
            raise InputError(
                f"a batch has labels of shape {tuple(batch['labels'].shape)}; with {shape[1]} texts or "
                f"pairs in a sample it must be {(shape[0], *label_counts[label])}"
            )

    def _wide_loss_of_outputs(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        # Of sums of exponentials; bfloat16 has two digits.
        with torch.autocast(outputs.device.type, enabled=False):
            wide = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
            return self.loss_of_outputs(wide, batch)

    needed_values: tuple[str, ...] = ()
    """Values of a batch that the loss needs."""
    loss_traits: TextLoss
    texts_without_margin = 1
    """Texts of a sample that are not compared with its first document, which counts among them."""
    output_name = ""
    """Name of the encoder's output in an evaluation."""

    def loss_of_outputs(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """Return the loss of the encoder's outputs (S, T, ...)."""
        raise NotImplementedError
