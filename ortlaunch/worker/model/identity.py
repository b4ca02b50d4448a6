"""What only ranks know of a training: its samples, and the weights that it takes as they are.

A checkpoint holds both, for it has only what is trained: LoRA's base is loaded, or made from the seed, once more.
"""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from ortlaunch.worker.data.identity import identity as of_data
from ortlaunch.worker.data.samples import Samples

_ELEMENTS = 64  # of each tensor that are looked at: another seed or another base changes nearly all


def identity(samples: Samples | None, model: nn.Module) -> dict[str, dict[str, object]]:
    """As a checkpoint holds it, by the names of recipe/resume_rules.OTHER_RULES; the model is whole, and on the CPU.

    samples: None where nothing is trained on.
    """
    data = {} if samples is None else {"data": of_data(samples)}
    return {**data, "weights": {"frozen": of_frozen(model)}}


@torch.no_grad()
def of_frozen(model: nn.Module) -> str | None:
    """A fingerprint of the parameters that are not trained; None: all are."""
    frozen = [(name, value) for name, value in model.named_parameters() if not value.requires_grad]
    found = hashlib.blake2b(digest_size=8)
    for name, value in frozen:
        some = value.reshape(-1)[:: max(1, value.numel() // _ELEMENTS)].float().cpu().contiguous()
        found.update(f"{name} {tuple(value.shape)}".encode() + some.numpy().tobytes())
    return found.hexdigest() if frozen else None
