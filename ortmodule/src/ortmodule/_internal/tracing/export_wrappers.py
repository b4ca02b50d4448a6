"""Wrappers of `torch.onnx.export` for ORT: TorchScript, no warnings, light shape inference."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ortmodule._internal.base.counters import tally
from ortmodule._internal.base.patching import (
    ModuleView,
    hide_package_unless_loaded,
    replace_attribute_temporarily,
)
from ortmodule._internal.base.repair_registry import EXPORT_SOURCES, TRANSITION, repair

if TYPE_CHECKING:
    from ortmodule._internal.base.ort_types import AnyFunction

_INFERENCE = "_jit_pass_onnx_graph_shape_type_inference"
# The largest number of elements of a weight that shape inference gets.
_MAX_ELEMENTS = 1024


@repair(
    "infer_shapes_without_weights",
    "trace wrapper",
    80,
    fault="Shape inference copies every weight twice: the export of BERT-large takes 9.0 seconds "
    "of a core instead of 4.4.",
    example="tracing/test_compat.py::test_each_check_passes[weights]",
)
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


@repair(
    "keep_constants_apart",
    "trace wrapper",
    40,
    fault="`repeat_interleave(2, dim=-1)`, as in rotary embeddings, changes the constant of "
    "every other operator with `dim=-1`: these stack or normalize over another dimension, "
    "without a word.",
    example="tracing/test_compat.py::test_each_check_passes[stacked]",
)
def wrap_export_to_clone_scalar_constants(torch_export: AnyFunction) -> AnyFunction:
    """Wrap an export so that its forms read copies of a graph's constants.

    Torch's repeat_interleave wraps a negative dimension in place (`dim += rank`), in a constant
    that other operators share. Later operators would then stack, sum or normalize over another
    dimension.
    """
    # The globals of the module that defines the helpers, because torch 2.9 and later have moved it.
    names = importlib.import_module("torch.onnx.symbolic_helper")._maybe_get_scalar.__globals__
    return replace_attribute_temporarily(
        sys.modules[names["__name__"]],
        "_parse_arg",
        functools.partial(_parse_argument_and_clone_scalar, names["_parse_arg"]),
    )(torch_export)


def _parse_argument_and_clone_scalar(
    torch_parse_argument: AnyFunction, *parse_arguments: object, **parse_keywords: object
) -> object:
    parsed = torch_parse_argument(*parse_arguments, **parse_keywords)
    return parsed.clone() if isinstance(parsed, torch.Tensor) and not parsed.dim() else parsed


@repair(
    "trace_swapped_weights",
    "trace wrapper",
    50,
    fault="`torch.func.functional_call` and `parametrize.cached()` in a forward pass end the "
    "export.",
    example="tracing/test_compat.py::test_each_check_passes[call]",
)
def wrap_export_allowing_functional_call(torch_export: AnyFunction) -> AnyFunction:
    """Wrap an export so that `torch.func.functional_call` and `parametrize.cached()` can be traced.

    Both refuse to run in a trace, although they work in one.
    """
    stateless = importlib.import_module("torch.nn.utils.stateless")
    parametrize = importlib.import_module("torch.nn.utils.parametrize")
    # functional_call and cached() check these two functions before they refuse a trace.
    jit = ModuleView(torch.jit, is_tracing=lambda: False)
    c = ModuleView(torch._C, _get_tracing_state=lambda: None)
    return replace_attribute_temporarily(stateless, "torch", ModuleView(torch, jit=jit))(
        replace_attribute_temporarily(parametrize, "torch", ModuleView(torch, _C=c))(torch_export)
    )


@repair(
    "export_with_torchscript",
    "trace wrapper",
    10,
    fault="On torch 2.9 and later the export takes the dynamo exporter, whose graphs ORTModule "
    "cannot read.",
    example="tracing/test_compat.py::test_each_check_passes[torchscript]",
)
def wrap_export_for_torchscript(torch_export: AnyFunction) -> AnyFunction:
    """Wrap an export so that it uses TorchScript.

    Torch 2.9 and later default to the dynamo exporter, whose graphs ORT cannot read.
    """
    return functools.partial(torch_export, dynamo=False)


@repair("export_with_torchscript", "after import", 30)
def _is_default_exporter_dynamo() -> bool:
    """Return whether `torch.onnx.export` defaults to the dynamo exporter (torch 2.9 and later).

    ORT cannot read the graphs of that exporter.
    """
    return inspect.signature(torch.onnx.export).parameters["dynamo"].default is True


@repair(
    "silence_export_warnings",
    "trace wrapper",
    90,
    fault="An export prints warnings about tracing, deprecation and DeepSpeed that a user cannot "
    "act on.",
    example="tracing/test_compat.py::test_each_check_passes[warnings]",
)
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


@repair("silence_export_warnings", "after import", 80)
def import_ort_hooks_without_warning() -> None:
    """Silence ORT's warning that its ZeRO 3 hooks do not support DeepSpeed 0.16.

    A user cannot act on that warning. Where DeepSpeed is not imported yet, the hooks do not load it.
    """
    with warnings.catch_warnings(), hide_package_unless_loaded("deepspeed"):
        warnings.filterwarnings("ignore", message="DeepSpeed import error")
        importlib.import_module("onnxruntime.training.utils.hooks")


@repair(
    "ignore_ort_export_cache",
    "install",
    190,
    replaces=f"{TRANSITION}._get_exported_model",
    fault="Under `ORTMODULE_CACHE_DIR` an evaluation runs the graph of training, with dropout.",
    example="tracing/test_exports.py::test_orts_own_cache_is_never_used",
    sources=EXPORT_SOURCES,
)
def _export_without_ort_cache(
    original_get_exported: AnyFunction, **ort_arguments: object
) -> object:
    if ort_arguments["ortmodule_cache_dir"]:
        tally.add_end_note_once(
            "ORTMODULE_CACHE_DIR is not used: ORT would take a graph of another mode or model from "
            "it"
        )
    return original_get_exported(**{**ort_arguments, "ortmodule_cache_dir": ""})
