"""What a data set is to the rest of the worker, and how its samples become a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from ortlaunch.worker.data.reading import DataError

Sample = Mapping[str, Any]
"""Names to tensors, arrays, lists or numbers: whatever torch makes a tensor of."""
Stack = Callable[[list[Sample]], dict[str, torch.Tensor]]
IGNORED = -100  # the label that cross entropy leaves out


class Samples(Protocol):
    """A data set; the epoch lets masking differ from one pass over the data to the next.

    One whose samples differ in how many labels count has `varies`, true; one that makes several at once sooner has
    `batch`: (index, epoch) of each -> a batch.
    """

    def __len__(self) -> int: ...
    def sample(self, index: int, epoch: int) -> Sample: ...


def cut_padding(batch: dict[str, torch.Tensor], buckets: Sequence[int]) -> dict[str, torch.Tensor]:
    """A batch of padded samples, (samples, length), to the shortest of the lengths that holds its longest sample."""
    mask = batch.get("attention_mask")
    if mask is None:
        return batch
    whole = mask.shape[1]
    needed = int(mask.sum(1).max())
    length = next((bucket for bucket in buckets if bucket >= needed), whole)
    on_the_left = (
        mask[:, 0].sum() < mask[:, -1].sum()
    )  # some tokenizers pad there; an empty text has no side
    kept = slice(whole - length, whole) if on_the_left else slice(length)
    return {
        name: value[:, kept].contiguous() if value.shape[1:2] == (whole,) else value
        for name, value in batch.items()
    }


def collate(samples: list[Sample]) -> dict[str, torch.Tensor]:
    """Stack samples of one shape into a batch."""
    batch = {}
    for name in samples[0]:
        try:
            values = [torch.as_tensor(sample[name]) for sample in samples]
        except KeyError:
            raise DataError(
                f"samples of one batch differ in their names: not all have {name!r}"
            ) from None
        except (TypeError, ValueError, RuntimeError) as error:  # all three are torch's
            raise DataError(
                f"{name!r} of a sample is no tensor, nor what becomes one: {error}"
            ) from None
        shapes = sorted({tuple(value.shape) for value in values})
        if len(shapes) > 1:
            raise DataError(
                f"samples of one batch differ in the shape of {name!r}: {shapes}; pad them in data.factory, or give "
                "data.collate"
            )
        batch[name] = torch.stack(values)
    return batch
