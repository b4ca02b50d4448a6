"""Wrappers of `torch.onnx.export` for ORT: TorchScript, no warnings, light shape inference."""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ortmodule._internal.base.patching import ModuleView, replace_attribute_temporarily

if TYPE_CHECKING:
    from ortmodule._internal.base.ort_types import AnyFunction

_INFERENCE = "_jit_pass_onnx_graph_shape_type_inference"
# The largest number of elements of a weight that shape inference gets.
_MAX_ELEMENTS = 1024


def wrap_export_hiding_large_weights_from_inference(torch_export: AnyFunction) -> AnyFunction:
    """Wrap an export so that its shape inference gets no large weights.

    Torch copies each weight twice for its shape alone.
    """

    @functools.wraps(torch_export)
    def export_without_weights(*args: object, **kwargs: object) -> object:
        with replace_attribute_temporarily(
            torch._C,
            _INFERENCE,
            functools.partial(_infer_shapes_without_large_weights, getattr(torch._C, _INFERENCE)),
        ):
            return torch_export(*args, **kwargs)

    return export_without_weights


def _infer_shapes_without_large_weights(
    torch_infer_shapes: Callable[..., None],
    graph: object,
    weight_by_name: dict[str, object],
    opset: int,
) -> None:
    """Run shape inference without large weights.

    Small ones stay, because a buffer's values may be the sizes of a view.
    """
    torch_infer_shapes(
        graph,
        {name: weight for name, weight in weight_by_name.items() if not _is_large(weight)},
        opset,
    )


def _is_large(weight: object) -> bool:
    return isinstance(weight, torch.Tensor) and weight.numel() > _MAX_ELEMENTS


def wrap_export_restoring_autocast_cache(torch_export: AnyFunction) -> AnyFunction:
    """Wrap an export so that it restores autocast's cache.

    Torch leaves the cache off after a failed trace.
    """

    @functools.wraps(torch_export)
    def export_with_autocasts_cache(*args: object, **kwargs: object) -> object:
        cached = torch.is_autocast_cache_enabled()
        try:
            return torch_export(*args, **kwargs)
        finally:
            torch.set_autocast_cache_enabled(cached)

    return export_with_autocasts_cache


def wrap_export_to_clone_scalar_constants(torch_export: AnyFunction) -> AnyFunction:
    """Wrap an export so that its forms read copies of a graph's constants.

    Torch's repeat_interleave wraps a negative dimension in place (`dim += rank`), in a constant
    that other operators share. Later operators would then stack, sum or normalize over another
    dimension.
    """

    @functools.wraps(torch_export)
    def export_with_own_constants(*args: object, **kwargs: object) -> object:
        # The globals of the module that defines the helpers, because torch 2.9 and later have moved
        # it.
        names = importlib.import_module("torch.onnx.symbolic_helper")._maybe_get_scalar.__globals__
        with replace_attribute_temporarily(
            sys.modules[names["__name__"]],
            "_parse_arg",
            functools.partial(_parse_argument_and_clone_scalar, names["_parse_arg"]),
        ):
            return torch_export(*args, **kwargs)

    return export_with_own_constants


def _parse_argument_and_clone_scalar(
    torch_parse_argument: AnyFunction, *parse_arguments: object, **parse_keywords: object
) -> object:
    parsed = torch_parse_argument(*parse_arguments, **parse_keywords)
    return parsed.clone() if isinstance(parsed, torch.Tensor) and not parsed.dim() else parsed


def wrap_export_allowing_functional_call(torch_export: AnyFunction) -> AnyFunction:
    """Wrap an export so that `torch.func.functional_call` and `parametrize.cached()` can be traced.

    Both refuse to run in a trace, although they work in one.
    """
    stateless = importlib.import_module("torch.nn.utils.stateless")
    parametrize = importlib.import_module("torch.nn.utils.parametrize")
    # functional_call and cached() check these two functions before they refuse a trace.
    jit = ModuleView(torch.jit, is_tracing=lambda: False)
    c = ModuleView(torch._C, _get_tracing_state=lambda: None)

    @functools.wraps(torch_export)
    def export_with_swapped_weights(*args: object, **kwargs: object) -> object:
        with (
            replace_attribute_temporarily(stateless, "torch", ModuleView(torch, jit=jit)),
            replace_attribute_temporarily(parametrize, "torch", ModuleView(torch, _C=c)),
        ):
            return torch_export(*args, **kwargs)

    return export_with_swapped_weights


def wrap_export_for_torchscript(torch_export: AnyFunction) -> AnyFunction:
    """Wrap an export so that it uses TorchScript.

    Torch 2.9 and later default to the dynamo exporter, whose graphs ORT cannot read.
    """
    return functools.partial(torch_export, dynamo=False)


def wrap_export_silencing_warnings(torch_export: AnyFunction) -> AnyFunction:
    """Wrap an export so that it gives no warnings about tracing and deprecation.

    A user cannot act on these warnings.
    """

    @functools.wraps(torch_export)
    def export_quietly(*args: object, **kwargs: object) -> object:
        with warnings.catch_warnings():
            for category in (torch.jit.TracerWarning, DeprecationWarning, FutureWarning):
                warnings.simplefilter("ignore", category)
            # Torch's shape inference warns in the name of its caller, which is `_infer_shapes_without_large_weights`.
            warnings.filterwarnings("ignore", module=rf"torch\.onnx|{__name__}")
            return torch_export(*args, **kwargs)

    return export_quietly
