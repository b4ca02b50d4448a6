"""`engine.matmul_precision`: torch's setting for a while, what it does on this device, and what it must not touch.

Torch's setting is the process's: it holds in torch's own products, in torch.compile's and in those that ONNX Runtime's
graph calls torch for. Must not import onnxruntime.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ortlaunch import machine
from ortlaunch.errors import EngineError
from ortlaunch.recipe import Recipe
from ortlaunch.recipe.rules.engine_rules import ort_multiplies
from ortlaunch.run_folder.engine_report import MatmulPrecision

if TYPE_CHECKING:
    from ortlaunch.ortmodule.base.ort_types import AnyFunction, Args, Kwargs

_FORMATS = {7: "bfloat16", 10: "tensorfloat32", 23: "float32"}
_SIZE = 256  # small products do not go to the fast units
_WIDE = 256
"""A model without a matrix as wide stays with MKL: a call of oneDNN costs some ten microseconds more."""
_PRODUCTS = (
    torch.matmul,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
    torch.bmm,
    torch.Tensor.bmm,
)


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


def multiply_by_onednn(recipe: Recipe, model: nn.Module, device: torch.device) -> bool:
    """Whether float32 products are to be oneDNN's in place of MKL's (`engine.onednn`); then they are from now on.

    Torch sends them there with its setting of `medium`, which lowers no precision where there is no unit for bfloat16
    inside float32 products: what a product keeps is measured.

    Raises:
        EngineError: `engine.onednn` asks for it, and a product keeps less than float32's bits.
    """
    asked = recipe.engine.onednn
    if asked is None:
        asked = _onednn_pays(recipe, model, device)
    if not asked:
        return False
    torch.set_float32_matmul_precision("medium")
    if (bits := mantissa_bits(device)) == 23:
        return True
    torch.set_float32_matmul_precision("highest")
    if recipe.engine.onednn:
        form = _FORMATS.get(bits, f"{bits} bits")
        raise EngineError(
            f"engine.onednn: true: on this processor oneDNN makes products of float32 numbers in {form}; write "
            "engine.matmul_precision: medium if that is wanted, else leave it out"
        )
    return False


def _onednn_pays(recipe: Recipe, model: nn.Module, device: torch.device) -> bool:
    exact = not recipe.format.is_narrow and recipe.engine.matmul_precision == "highest"
    if not exact or device.type != "cpu" or not machine.onednn_is_faster():
        return False
    if recipe.engine.name == "ort" and ort_multiplies(recipe):
        return False
    return any(p.ndim == 2 and min(p.shape) >= _WIDE for p in model.parameters())


def describe(asked: str, device: torch.device, onednn: bool = False) -> MatmulPrecision:
    """For engine.json: what was asked, torch's setting, what a product of this rank keeps, and why no less."""
    bits = mantissa_bits(device)
    gains_nothing = asked != "highest" and bits == 23
    why = (
        machine.without_matrix_unit(asked)
        if device.type == "cpu"
        else "this GPU has no TensorFloat32"
    )
    in_force = torch.get_float32_matmul_precision()
    form = _FORMATS.get(bits, f"{bits} bits")
    return MatmulPrecision(asked, in_force, bits, form, why if gains_nothing else None, onednn)


def keep_positions_exact(model: nn.Module) -> None:
    """Rotary embeddings multiply positions by frequencies, as a product over one element: do that by elements.

    In bfloat16 position 257 is 256, in TF32 2049 is 2048 (transformers issue 48428; 5.23 does so itself).
    """
    for module in model.modules():
        if any("inv_freq" in name for name, _ in module.named_buffers(recurse=False)):
            module.forward = functools.partial(_by_elements, module.forward)


def _by_elements(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> object:
    with _ByElements():
        return forward(*args, **kwargs)


class _ByElements(TorchFunctionMode):
    """A matrix product over one element is one multiplication each."""

    def __torch_function__(
        self, func: AnyFunction, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        if func in _PRODUCTS and not kwargs and args[0].shape[-1] == 1:
            return args[0] * args[1]
        return func(*args, **(kwargs or {}))
