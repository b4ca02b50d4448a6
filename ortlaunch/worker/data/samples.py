"""The interface of data sets to the rest of the worker, and the making of batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from ortlaunch.worker.data.file_rows import DataError

Sample = Mapping[str, Any]
"""Names to tensors, or to values that torch converts to tensors: arrays, lists or numbers."""
Stack = Callable[[list[Sample]], dict[str, torch.Tensor]]
# The label that PyTorch's cross entropy ignores.
IGNORED = -100


class Samples(Protocol):
    """A data set; with the epoch, masking differs from one pass over the data to the next.

    Optional attributes: `varies` is true if samples differ in the number of labels that count.
    `batch`, of a list of `SampleEpoch`, exists if several samples at once are made faster.
    """

    def __len__(self) -> int: ...
    def sample(self, index: int, epoch: int) -> Sample: ...


def cut_padding_to_shortest_fitting_bucket(
    batch: dict[str, torch.Tensor], bucket_lengths: Sequence[int]
) -> dict[str, torch.Tensor]:
    """Cut the padding of a batch to the shortest bucket that has room for its longest sample.

    Args:
        batch: tensors with the length of the mask, (samples, length) or (samples, texts, length), are
            cut; others stay.
        bucket_lengths: allowed lengths, ascending.
    """
    mask = batch.get("attention_mask")
    if mask is None:
        return batch
    padded_length = mask.shape[-1]
    longest = int(mask.sum(-1).max())
    length = next((bucket for bucket in bucket_lengths if bucket >= longest), padded_length)
    # Some tokenizers pad on the left. All rows are summed, as an empty text shows no side.
    on_the_left = mask[..., 0].sum() < mask[..., -1].sum()
    kept_slice = slice(padded_length - length, padded_length) if on_the_left else slice(length)
    length_axis = mask.dim() - 1
    kept = (slice(None),) * length_axis + (kept_slice,)

    def is_cut(value: torch.Tensor) -> bool:
        # Floats are labels of classes, and integers may be those of a decoder: of both there may be
        # as many as tokens.
        if value.shape[length_axis:][:1] != (padded_length,) or value.is_floating_point():
            return False
        counts = [int((each != IGNORED).sum()) for each in (value, value[kept])]
        return value is not batch.get("labels") or counts[0] == counts[1]

    return {
        name: value[kept].contiguous() if is_cut(value) else value for name, value in batch.items()
    }


def collate(samples: list[Sample]) -> dict[str, torch.Tensor]:
    """Stack samples of one shape into a batch.

    Raises:
        DataError: samples differ in names or shapes, or a value cannot become a tensor.
    """
    batch = {}
    for name in samples[0]:
        try:
            values = [torch.as_tensor(sample[name]) for sample in samples]
        except KeyError:
            raise DataError(
                f"samples of one batch differ in their names: not all have {name!r}"
            ) from None
        # torch raises all three.
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(
                f"{name!r} of a sample cannot become a tensor: {error}; leave it out of the samples, or "
                "give data.collate"
            ) from None
        shapes = sorted({tuple(value.shape) for value in values})
        if len(shapes) > 1:
            raise DataError(
                f"samples of one batch differ in the shape of {name!r}: {shapes}; "
                "pad them in data.train.factory, or give data.collate"
            )
        batch[name] = torch.stack(values)
    return batch
