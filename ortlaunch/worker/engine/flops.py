"""Floating point operations of a model's passes, and the rate of this device."""

from __future__ import annotations

import time

import torch

from ortlaunch.worker.model.quantized_weights import parameter_element_count

# Dense matrix products of 16 bits, in operations per second, by NVIDIA's data sheets. A name that
# holds another one is before it.
_VENDOR_FLOPS_PER_SECOND = {
    "B200": 2.25e15,
    "H200": 9.89e14,
    "H100 PCIe": 7.56e14,
    "H100": 9.89e14,
    "A100": 3.12e14,
    "L40S": 3.62e14,
    "L4": 1.21e14,
    "A10": 1.25e14,
    "V100": 1.25e14,
}


def vendor_flops_per_second_or_none(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the rate of matrix products that the vendor states for a GPU.

    None: a type of 32 bits, a CPU, or a GPU that the table does not have.
    """
    if device.type != "cuda" or dtype.itemsize != 2:
        return None
    gpu_name = torch.cuda.get_device_name(device)
    return next((rate for name, rate in _VENDOR_FLOPS_PER_SECOND.items() if name in gpu_name), None)


def training_flops_per_token_or_none(
    model: torch.nn.Module, sequence_length: int | None
) -> float | None:
    """Return the floating point operations of forward and backward per token.

    The formula is from Chowdhery et al., "PaLM" (2022), appendix B: 6 for each weight that
    multiplies (4 if it is frozen), and 12 x layers x hidden x length for attention. The result is
    None for models without a transformers config.
    """
    config = getattr(model, "config", None)
    if config is None or sequence_length is None or not hasattr(config, "num_hidden_layers"):
        return None
    # Embedding tables are looked up, not multiplied, unless the head uses the same weight.
    tables = [m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    output_embeddings = getattr(model, "get_output_embeddings", None)
    head = output_embeddings() if output_embeddings else None
    tied = {id(head.weight)} if head is not None else set()
    looked_up = {id(table) for table in tables} - tied
    weights = sum(
        (6 if p.requires_grad else 4) * parameter_element_count(p)
        for p in model.parameters()
        if id(p) not in looked_up
    )
    return float(weights + 12 * config.num_hidden_layers * config.hidden_size * sequence_length)


def measure_peak_flops_per_second(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the rate of a large matmul, in operations per second: the reference of MFU.

    On a CPU the result is the higher rate of float32 and `dtype`.
    """
    if device.type == "cuda":
        return _best_matmul_flops_per_second(device, dtype, 8192)
    best = _best_matmul_flops_per_second(device, torch.float32, 1024)
    # Some CPUs have bfloat16 in software only, a hundred times slower: a small matmul shows it,
    # and a large one would take seconds.
    if dtype == torch.float32 or _best_matmul_flops_per_second(device, dtype, 256) < best / 8:
        return best
    return max(best, _best_matmul_flops_per_second(device, dtype, 1024))


def _best_matmul_flops_per_second(
    device: torch.device, dtype: torch.dtype, side_length: int
) -> float:
    """Return the best rate of five matmuls, in operations per second."""
    a = torch.randn(side_length, side_length, device=device).to(dtype)
    least_seconds = float("inf")
    for _ in range(5):
        wait_for_device(device)
        start = time.perf_counter()
        a @ a
        wait_for_device(device)
        least_seconds = min(least_seconds, time.perf_counter() - start)
    return 2 * side_length**3 / least_seconds


def wait_for_device(device: torch.device) -> None:
    """Wait until the device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
