"""Tensors that wait for the backward pass, in host memory (`model.offload_activations`)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.autograd.graph import saved_tensors_hooks


def keep_saved_tensors_on_host_except(weights: Iterable[torch.Tensor]) -> saved_tensors_hooks:
    """Return a context whose forward pass keeps its tensors in host memory, but for `weights`.

    As torch's save_on_cpu, which would copy the weights, too.
    """
    # A view of a weight, as its transpose, has the same storage.
    resident = {weight.untyped_storage().data_ptr() for weight in weights}

    def pack(tensor: torch.Tensor) -> tuple[torch.device, torch.Tensor]:
        if tensor.untyped_storage().data_ptr() in resident:
            return tensor.device, tensor
        host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        return tensor.device, host.copy_(tensor)

    def unpack(packed: tuple[torch.device, torch.Tensor]) -> torch.Tensor:
        device, tensor = packed
        return tensor.to(device, non_blocking=tensor.is_pinned())

    return saved_tensors_hooks(pack, unpack)
