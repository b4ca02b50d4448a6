"""`engine.matmul_precision`: torch's setting, its effect on this device, and its exceptions.

The setting is global to the process. It applies to matmuls of torch, of torch.compile, and of torch
calls in ONNX Runtime's graph. This module must not import onnxruntime.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ortlaunch.base import machine
from ortlaunch.base.errors import EngineError
from ortlaunch.recipe import Recipe
from ortlaunch.recipe.rules.engine_rules import setting_that_disables_torch_matmul
from ortlaunch.run_folder.engine_report import MatmulPrecision

if TYPE_CHECKING:
    from ortlaunch.worker.call_types import AnyFunction, Args, Kwargs

# Names of the formats by the bits of their mantissa.
_FORMATS = {7: "bfloat16", 10: "tensorfloat32", 23: "float32"}
# Small matmuls do not use the fast units.
_TEST_SIZE = 256
# Models whose matrices are all smaller stay with MKL: a call of oneDNN costs about ten microseconds
# more.
_LEAST_WIDTH = 96
_PRODUCTS = (
    torch.matmul,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
    torch.bmm,
    torch.Tensor.bmm,
)


@contextlib.contextmanager
def use_matmul_precision(precision: str) -> Iterator[None]:
    """Set the precision of float32 matmuls while the context is open: highest, high or medium."""
    former_precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(former_precision)


def measure_matmul_mantissa_bits(device: torch.device) -> int:
    """Measure the mantissa bits of a float32 matmul on this device: 23, 10 (TF32) or 7 (bf16)."""
    # Column k of the matrix is 1 + 2^-k. Multiplied by the identity it stays equal as long as bit k
    # is kept.
    columns = 1 + 2.0 ** -torch.arange(1, 24, device=device)
    matrix = torch.ones(_TEST_SIZE, _TEST_SIZE, device=device)
    matrix[:, : len(columns)] = columns
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        is_kept = torch.eye(_TEST_SIZE, device=device) @ matrix == matrix
    return int(is_kept.all(0)[: len(columns)].sum())


def use_onednn_if_required_or_faster(
    recipe: Recipe, model: nn.Module, device: torch.device
) -> bool:
    """Use oneDNN instead of MKL for float32 matmuls if `engine.onednn` requires it or it is faster.

    Returns:
        Whether oneDNN is in use from now on.

    Raises:
        EngineError: `engine.onednn` is true, and a matmul keeps fewer bits than float32 has.
    """
    requested = recipe.engine.onednn
    if not (
        _is_onednn_allowed_and_faster(recipe, model, device) if requested is None else requested
    ):
        return False
    # Torch calls oneDNN at its setting `medium`. This does not lower the precision on processors
    # without a bfloat16 unit inside float32 matmuls: so measure it.
    torch.set_float32_matmul_precision("medium")
    if (bits := measure_matmul_mantissa_bits(device)) == 23:
        return True
    torch.set_float32_matmul_precision("highest")
    if recipe.engine.onednn:
        format_name = _FORMATS.get(bits, f"{bits} bits")
        raise EngineError(
            "engine.onednn: true: on this processor oneDNN computes the float32 matmul in "
            f"{format_name}; set engine.matmul_precision: medium if that is intended, else leave it out"
        )
    return False


def _is_onednn_allowed_and_faster(recipe: Recipe, model: nn.Module, device: torch.device) -> bool:
    return (
        not recipe.format.is_narrow
        and recipe.engine.matmul_precision == "highest"
        and device.type == "cpu"
        and machine.is_onednn_faster()
        and not (recipe.engine.name == "ort" and setting_that_disables_torch_matmul(recipe))
        and any(p.ndim == 2 and min(p.shape) >= _LEAST_WIDTH for p in model.parameters())
    )


def measure_matmul_precision_record(
    requested: str, device: torch.device, uses_onednn: bool = False
) -> MatmulPrecision:
    """Return the record for engine.json.

    It has the requested precision, torch's setting, the measured bits of a matmul on this rank, and
    the reason if the requested precision saves no bits.
    """
    bits = measure_matmul_mantissa_bits(device)
    gains_nothing = requested != "highest" and bits == 23
    no_gain_reason = (
        machine.reason_cpu_matmul_precision_gains_nothing_or_none(requested)
        if device.type == "cpu"
        else "this GPU has no TensorFloat32"
    )
    in_force = torch.get_float32_matmul_precision()
    format_name = _FORMATS.get(bits, f"{bits} bits")
    return MatmulPrecision(
        requested,
        in_force,
        bits,
        format_name,
        no_gain_reason if gains_nothing else None,
        uses_onednn,
    )


def patch_rotary_to_multiply_elementwise(model: nn.Module) -> None:
    """Make rotary embeddings multiply positions by frequencies elementwise, not by a matmul."""
    # In bfloat16 position 257 becomes 256, in TF32 2049 becomes 2048 (transformers issue 48428).
    # transformers 5.23 multiplies elementwise itself.
    for module in model.modules():
        if any("inv_freq" in name for name, _ in module.named_buffers(recurse=False)):
            module.forward = functools.partial(_forward_elementwise, module.forward)


def _forward_elementwise(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> object:
    with _ElementwiseMode():
        return forward(*args, **kwargs)


class _ElementwiseMode(TorchFunctionMode):
    """A mode that replaces matmuls with an inner dimension of 1 by elementwise multiplication."""

    def __torch_function__(
        self, func: AnyFunction, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        if func in _PRODUCTS and not kwargs and args[0].shape[-1] == 1:
            return args[0] * args[1]
        return func(*args, **(kwargs or {}))
