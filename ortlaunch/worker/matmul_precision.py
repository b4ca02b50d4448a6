"""`engine.matmul_precision`: torch's setting for a while, what it does on this device, and what it must not touch.

Torch's setting is the process's: it holds in torch's own products, in torch.compile's and in those that ONNX Runtime's
graph calls torch for. Must not import onnxruntime.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ortlaunch import machine
from ortlaunch.run.engine_report import MatmulPrecision

_FORMATS = {7: "bfloat16", 10: "tensorfloat32", 23: "float32"}
_SIZE = 256  # small products do not go to the fast units
_PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm, torch.Tensor.bmm)


@contextlib.contextmanager
def matmul_precision(word: str) -> Iterator[None]:
    """While open, products of float32 matrices are as exact as this word says: highest, high or medium."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(word)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def mantissa_bits(device: torch.device) -> int:
    """Bits after the point that a product of float32 matrices keeps now, on this device: 23, 10 (TF32) or 7 (bf16).

    Column k of a matrix is 1 + 2^-k; times the identity it is what it was, up to the last bit that is kept.
    """
    columns = 1 + 2.0 ** -torch.arange(1, 24, device=device)
    matrix = torch.ones(_SIZE, _SIZE, device=device)
    matrix[:, : len(columns)] = columns
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        kept = torch.eye(_SIZE, device=device) @ matrix == matrix
    return int(kept.all(0)[: len(columns)].sum())


def describe(asked: str, device: torch.device) -> MatmulPrecision:
    """For engine.json: what was asked, torch's setting, what a product of this rank keeps, and why no less."""
    bits = mantissa_bits(device)
    gains_nothing = asked != "highest" and bits == 23
    why = machine.without_matrix_unit(asked) if device.type == "cpu" else "this GPU has no TensorFloat32"
    in_force, form = torch.get_float32_matmul_precision(), _FORMATS.get(bits, f"{bits} bits")
    return MatmulPrecision(asked, in_force, bits, form, why if gains_nothing else None)


def keep_positions_exact(model: nn.Module) -> None:
    """Rotary embeddings multiply positions by frequencies, as a product over one element: do that by elements.

    In bfloat16 position 257 is 256, in TF32 2049 is 2048 (transformers issue 48428; 5.23 does so itself).
    """
    for module in model.modules():
        if any("inv_freq" in name for name, _ in module.named_buffers(recurse=False)):
            module.forward = functools.partial(_by_elements, module.forward)


def _by_elements(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _ByElements():
        return forward(*args, **kwargs)


class _ByElements(TorchFunctionMode):
    """A matrix product over one element is one multiplication each."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS and not kwargs and args[0].shape[-1] == 1:
            return args[0] * args[1]
        return func(*args, **(kwargs or {}))
