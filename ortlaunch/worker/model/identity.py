"""The identity of a training that only ranks can compute: its samples and its frozen weights.

A checkpoint records both, because it stores trained weights only: a resumed run loads the base of
LoRA again, or makes it from the seed.
"""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from ortlaunch.worker.data.identity import data_identity_record as of_data
from ortlaunch.worker.data.samples import Samples
from ortlaunch.worker.model.quantized_weights import quantized_layers, scale_tensors

# Elements of each tensor in the fingerprint: another seed or another base changes nearly all.
_ELEMENTS = 64


def data_and_frozen_weights_identity(
    samples: Samples | None, model: nn.Module
) -> dict[str, dict[str, object]]:
    """Return the identity as in a checkpoint, by the names of recipe/resume_rules.OTHER_RULES.

    Args:
        samples: the training samples; None if there is no training.
        model: the model, with whole parameters on the CPU.
    """
    data = {} if samples is None else {"data": of_data(samples)}
    return {**data, "weights": {"frozen": frozen_weights_fingerprint_or_none(model)}}


@torch.no_grad()
def frozen_weights_fingerprint_or_none(model: nn.Module) -> str | None:
    """Return a fingerprint of the frozen parameters; None if all are trained."""
    # A rank without weights gets the fingerprint from the one that has them.
    frozen: list[tuple[str, torch.Tensor]] = [
        (name, value)
        for name, value in model.named_parameters()
        if not value.requires_grad and not value.is_meta
    ]
    # The packed weights of two bases that differ by a factor are the same.
    frozen += [
        (f"{name}.scale", scale)
        for name, layer in quantized_layers(model)
        for scale in scale_tensors(layer)
    ]
    fingerprint = hashlib.blake2b(digest_size=8)
    for name, value in frozen:
        some_values = (
            value.reshape(-1)[:: max(1, value.numel() // _ELEMENTS)].float().cpu().contiguous()
        )
        fingerprint.update(f"{name} {tuple(value.shape)}".encode() + some_values.numpy().tobytes())
    return fingerprint.hexdigest() if frozen else None
