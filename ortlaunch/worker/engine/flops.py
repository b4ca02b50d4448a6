"""Floating point operations of a model's passes, and the rate of this device."""

from __future__ import annotations

import time

import torch


def flops_per_token(model: torch.nn.Module, sequence_length: int | None) -> float | None:
    """Floating point operations of forward and backward a token, after Chowdhery et al., "PaLM" (2022), appendix B.

    6 for each weight that multiplies (4 where it is frozen), and 12 x layers x hidden x length for attention. None
    for models without a transformers config.
    """
    config = getattr(model, "config", None)
    if config is None or sequence_length is None or not hasattr(config, "num_hidden_layers"):
        return None
    tables = [m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    output_embeddings = getattr(model, "get_output_embeddings", None)
    head = output_embeddings() if output_embeddings else None
    tied = {id(head.weight)} if head is not None else set()
    looked_up = {id(table) for table in tables} - tied
    weights = sum(
        (6 if p.requires_grad else 4) * p.numel()
        for p in model.parameters()
        if id(p) not in looked_up
    )
    return float(weights + 12 * config.num_hidden_layers * config.hidden_size * sequence_length)


def measured_peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Rate of a large matrix product here and now, operations a second: what MFU is measured against.

    On a CPU float32's where that is the higher: some have bfloat16 in software alone, a hundred times slower.
    """
    if device.type == "cuda":
        return _rate_of_products(device, dtype, 8192)
    best = _rate_of_products(device, torch.float32, 1024)
    if (
        dtype == torch.float32 or _rate_of_products(device, dtype, 256) < best / 8
    ):  # a large one would take seconds
        return best
    return max(best, _rate_of_products(device, dtype, 1024))


def _rate_of_products(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """The best of five."""
    a = torch.randn(size, size, device=device).to(dtype)
    best = float("inf")
    for _ in range(5):
        wait_for(device)
        start = time.perf_counter()
        a @ a
        wait_for(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def wait_for(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
