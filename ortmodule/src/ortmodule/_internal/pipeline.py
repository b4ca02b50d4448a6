"""The steps of an export in their order: a trace under contexts, passes over the graph, verdicts.

A repair's steps are declared at their functions (repair_registry.py) and run only where it is
applied; `python -m ortmodule.export` prints them. No graph is cached
between runs. A trace depends on everything that Python code reads (closures, globals, classes,
files), so the only sound key would be the traced graph itself, and the steps after the trace are
not worth a cache (docs/repairs.md).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch

from ortmodule._internal.base import counters, garbage
from ortmodule._internal.base.counters import tally
from ortmodule._internal.base.export import (
    begin_trace_and_get_export_context,
    export_context_from_ort_arguments,
)
from ortmodule._internal.base.ort_types import AnyFunction
from ortmodule._internal.base.patching import ModuleView
from ortmodule._internal.base.repair_registry import (
    TRANSITION,
    applied_steps,
    replace_ort_function,
)
from ortmodule._internal.base.source_guard import owning_class_or_module
from ortmodule._internal.graph_repairs import bfloat16, padding, postprocess
from ortmodule._internal.state import unsupported_models
from ortmodule._internal.torch_in_graph import (
    attention,
    head_loss,
    operator_translation,
    torch_modules,
)
from ortmodule._internal.tracing import export_wrappers, observer

_PACKAGE_FOLDER = str(Path(__file__).parent)
REPAIR_MODULES = (
    *(
        f"{room}.{file.stem}"
        for room in ("base", "tracing", "torch_in_graph", "state", "graph_repairs")
        for file in sorted(Path(_PACKAGE_FOLDER, room).glob("*.py"))
    ),
    "graph_cache",
    "session_settings",
)
"""The modules in which repairs are declared: all of these rooms, and two that need more than one."""
for _module in REPAIR_MODULES:
    importlib.import_module(f"ortmodule._internal.{_module}")


def install_export_steps_in_ort() -> None:
    """Install these steps in ORT's export, once in a process."""
    # Only this module of ORT exports. It finds `torch.onnx.export` through its global `torch`,
    # replaced here. Other callers still get torch's own.
    owning_class_or_module("_graph_transition_manager:").torch = ModuleView(
        torch, onnx=ModuleView(torch.onnx, export=_export_by_wrapped_torch_export)
    )
    owning_class_or_module("_io:").gc = ModuleView(gc, collect=garbage.collect_new_objects)
    replace_ort_function(f"{TRANSITION}._get_exported_model", _trace_until_torch_layers_are_found)
    replace_ort_function(
        f"{TRANSITION}._export_model", _export_then_narrow_gradient_names_and_check_facts
    )
    # Inside the next one, which exports again if an operator has no kernel.
    bfloat16.install_bfloat16_repairs_for_gpu_graphs()
    operator_translation.install_build_retries_and_readable_errors()
    unsupported_models.install_cause_messages_for_pass_errors()


def _export_then_narrow_gradient_names_and_check_facts(
    original_export_model: AnyFunction, **ort_arguments: object
) -> object:
    """Run all phases of an export; a replacement for ORT's `_export_model`."""
    with counters.while_building():
        model, schema, names, differentiable_names = original_export_model(
            **ort_arguments
        )  # calls _trace_until_torch_layers_are_found
        export_context = export_context_from_ort_arguments(ort_arguments)
        for narrow_names in applied_steps("gradient selection"):
            differentiable_names = narrow_names(export_context, model, differentiable_names)
        for apply_verdict in applied_steps("verdict"):
            apply_verdict(export_context)
    return model, schema, names, differentiable_names


def _trace_until_torch_layers_are_found(
    original_get_exported: AnyFunction, **ort_arguments: object
) -> object:
    """Run the contexts, the trace and the graph passes; a replacement for ORT's `_get_exported_model`."""
    export_context = export_context_from_ort_arguments(ort_arguments)
    unsupported_models.refuse_sparse_gradients_and_complex_weights(export_context.module)
    # Each retry marks one more layer to run as torch, so the loop ends with the last layer.
    while True:
        try:
            return _trace_and_rewrite_graph(original_get_exported, ort_arguments)
        except torch_modules.RepeatExportWithTorchLayer:
            continue


def _trace_and_rewrite_graph(
    original_get_exported: AnyFunction, ort_arguments: dict[str, object]
) -> object:
    export_context = begin_trace_and_get_export_context(ort_arguments)
    with _count_and_time_export():
        with contextlib.ExitStack() as contexts:
            for context in (
                garbage.keep_new_objects_apart_from_libraries(),
                observer.observe_trace(export_context.facts),
                *(enter(export_context) for enter in applied_steps("context")),
                padding.replace_torch_pad_temporarily(export_context),
                unsupported_models.run_compiled_layers_uncompiled(export_context.module),
                attention.let_transformers_leave_out_causal_masks(export_context),
                attention.zero_padding_in_transformer_encoder_outputs(),
                operator_translation.keep_torch_operators_while_exporting(export_context),
                torch_modules.record_torch_layers_as_single_calls(export_context),
            ):
                contexts.enter_context(context)
            with _raise_refusals_without_ort_traceback():
                model, schema = original_get_exported(
                    **ort_arguments
                )  # calls _export_by_wrapped_torch_export
        bfloat16.correct_type_code_of_bfloat16_casts(model)
        for rewrite in applied_steps("graph pass"):
            rewrite(export_context, model)
        model = postprocess.apply_check_and_record_user_postprocess_if_set(export_context, model)
    return model, schema


# wraps, because ORT reads the function's signature.
@functools.wraps(torch.onnx.export)
def _export_by_wrapped_torch_export(*args: object, **kwargs: object) -> object:
    """Run the wrapped trace; a replacement for `torch.onnx.export` in ORT."""
    return export_wrappers.wrap_export_restoring_autocast_cache(
        _torch_export_with_active_wrappers()
    )(*args, **kwargs)


@functools.cache
def _torch_export_with_active_wrappers() -> AnyFunction:
    # Not a repair, because the operator is this package's own.
    export = head_loss.wrap_export_keeping_chunked_loss(torch.onnx.export)
    for wrap_export in applied_steps("trace wrapper"):
        export = wrap_export(export)
    return export


@contextlib.contextmanager
def _raise_refusals_without_ort_traceback() -> Iterator[None]:
    """Raise a refusal of this package as it is, without the traceback that ORT puts around it.

    The exception keeps ORT's type, by which it decides about its fallback.
    """
    try:
        yield
    except Exception as error:
        inner_error: BaseException | None = error
        while inner_error is not None:
            frames = traceback.extract_tb(inner_error.__traceback__)[-1:]
            if inner_error is not error and any(
                frame.filename.startswith(_PACKAGE_FOLDER) for frame in frames
            ):
                raise type(error)(str(inner_error)) from inner_error
            inner_error = inner_error.__context__
        raise


@contextlib.contextmanager
def _count_and_time_export() -> Iterator[None]:
    started_at = time.perf_counter()
    yield
    tally.exports += 1
    tally.export_seconds += time.perf_counter() - started_at
