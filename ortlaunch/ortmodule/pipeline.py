"""The steps of an export in their order: a trace under contexts, passes over the graph, verdicts.

Each step belongs to a repair (repairs.py) and runs only if that is applied. No graph is cached
between runs. A trace depends on everything that Python code reads (closures, globals, classes,
files), so the only sound key would be the traced graph itself, and the steps after the trace are
not worth a cache (docs/repairs.md).
"""

from __future__ import annotations

import contextlib
import functools
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

import onnx
import torch

from ortlaunch.ortmodule.base import counters, custom_functions, gradients, patching
from ortlaunch.ortmodule.base.counters import tally
from ortlaunch.ortmodule.base.export import Export, export_from_arguments
from ortlaunch.ortmodule.base.ort_types import AnyFunction
from ortlaunch.ortmodule.base.registry import applied_repairs
from ortlaunch.ortmodule.base.source_guard import TRANSITION, function_owner
from ortlaunch.ortmodule.graph_repairs import (
    bfloat16,
    broadcasts,
    constant_outputs,
    convolutions,
    copied_inputs,
    gradient_names,
    padding,
    postprocess,
)
from ortlaunch.ortmodule.state import buffers, model_state, unsupported, weight_changes
from ortlaunch.ortmodule.state import python_values as values
from ortlaunch.ortmodule.torch_in_graph import (
    attention,
    head_loss,
    operator_table,
    operator_translation,
    torch_modules,
)
from ortlaunch.ortmodule.tracing import (
    aliases,
    checkpointing,
    cross_entropy,
    escapes,
    grad_mode,
    tracing,
)

_PACKAGE_FOLDER = str(Path(__file__).parent)
Step = TypeVar("Step")
Trace = AnyFunction

# 1. Contexts of the plain pass, which gives ORT the model's outputs, and of the trace; the
# outermost first.
_CONTEXT_STEPS: tuple[tuple[str, Callable[[Export], AbstractContextManager[None]]], ...] = (
    ("detect_traced_values", values.record_value_reads),
    ("export_smoothed_cross_entropy", cross_entropy.write_out_cross_entropy),
    ("skip_ignored_labels", cross_entropy.leave_out_ignored_labels),
    ("map_gradient_checkpointing", checkpointing.call_checkpoints_directly),
    ("refuse_weight_changes", weight_changes.refuse_changes_keep_weights),
    ("follow_model_state", model_state.record_or_refuse_state),
    ("stop_gradient_under_no_grad", grad_mode.record_grad_mode_reads),
    ("keep_buffers_exact", buffers.restore_modes_and_buffers),
    ("detect_kept_tensors", escapes.record_escaped_tensors),
)
# 2. Wrappers of the trace alone, the innermost first.
_TRACE_STEPS: tuple[tuple[str, Callable[[Trace], Trace]], ...] = (
    ("export_with_torchscript", tracing.wrap_for_torchscript),
    ("refuse_custom_backward", custom_functions.wrap_with_inlining_choice),
    ("export_exact_forms", operator_table.wrap_with_exact_forms),
    ("keep_constants_apart", tracing.wrap_with_copied_constants),
    ("trace_swapped_weights", tracing.wrap_allowing_swapped_weights),
    # Inside the next one, which must track the tensors that this one computes.
    ("propagate_inplace_views", aliases.wrap_with_alias_tracking),
    ("stop_gradient_under_no_grad", grad_mode.wrap_with_grad_mode_tracking),
    ("infer_shapes_without_weights", tracing.wrap_hiding_large_weights),
    ("silence_export_warnings", tracing.wrap_silencing_warnings),
    ("keep_buffers_exact", buffers.wrap_preserving_modes),
)
# 3. Passes over the exported graph.
_GRAPH_STEPS: tuple[tuple[str, Callable[[Export, onnx.ModelProto], None]], ...] = (
    ("keep_buffers_exact", buffers.add_batch_size_outputs),
    ("skip_ignored_labels", cross_entropy.use_shrunken_gathers),
    ("export_grouped_conv1d_as_conv2d", convolutions.rewrite_grouped_convolutions),
    ("keep_broadcast_sizes", broadcasts.record_batch_sizes),
    ("concatenate_constants", gradient_names.keep_constants_apart),
    ("sum_repeated_weights", copied_inputs.copy_repeated_weights),
    ("export_smoothed_cross_entropy", copied_inputs.copy_uncomputed_scores),
    ("compute_constant_outputs", constant_outputs.add_constant_output_nodes),
)
# 4. Selection of the inputs and weights that get a gradient.
_GRADIENT_STEPS: tuple[
    tuple[str, Callable[[Export, onnx.ModelProto, list[str]], list[str]]], ...
] = (
    ("skip_frozen_gradients", gradients.names_without_frozen),
    ("skip_unreached_weights", gradients.names_without_unreached),
)
# 5. Consequences of the trace: reported, stored in options, or an error.
_VERDICT_STEPS: tuple[tuple[str, Callable[[Export], None]], ...] = (
    ("map_gradient_checkpointing", checkpointing.enable_ort_recomputation),
    ("skip_ignored_labels", cross_entropy.record_label_density),
    ("detect_traced_values", values.refuse_or_note_values),
)


def install_export_steps() -> None:
    """Install these steps in ORT's export, once in a process."""
    patching.replace_ort_export(_export_by_wrappers)
    patching.wrap_method(function_owner(TRANSITION), "_get_exported_model", _trace_with_retries)
    patching.wrap_method(function_owner(TRANSITION), "_export_model", _export_model_by_steps)
    # Inside the next one, which exports again if an operator has no kernel.
    bfloat16.install_bfloat16_repairs()
    operator_translation.install_translation_retries()
    unsupported.install_cause_messages()


def _export_model_by_steps(original: AnyFunction, **arguments: object) -> object:
    """Run steps 1 to 5; a replacement for ORT's `_export_model`."""
    with counters.while_building():
        model, schema, names, differentiable_names = original(**arguments)  # calls _traced
        export = export_from_arguments(arguments)
        for narrow_names in _active_steps(_GRADIENT_STEPS):
            differentiable_names = narrow_names(export, model, differentiable_names)
        for apply_verdict in _active_steps(_VERDICT_STEPS):
            apply_verdict(export)
    return model, schema, names, differentiable_names


def _trace_with_retries(original: AnyFunction, **arguments: object) -> object:
    """Run steps 1 to 3; a replacement for ORT's `_get_exported_model`."""
    if arguments["ortmodule_cache_dir"] and "ignore_ort_export_cache" in applied_repairs():
        tally.add_note_once(
            "ORTMODULE_CACHE_DIR is not used: ORT would take a graph of another mode or model from "
            "it"
        )
        arguments["ortmodule_cache_dir"] = ""
    export = export_from_arguments(arguments)
    unsupported.refuse_sparse_or_complex(export.module)
    # Each retry marks one more layer to run as torch, so the loop ends with the last layer.
    while True:
        try:
            return _trace_once(export, original, arguments)
        except torch_modules.RepeatExport:
            continue


def _trace_once(export: Export, original: AnyFunction, arguments: dict[str, object]) -> object:
    export.facts.clear()
    with _count_export():
        with contextlib.ExitStack() as contexts:
            for context in _active_steps(_CONTEXT_STEPS):
                contexts.enter_context(context(export))
            contexts.enter_context(padding.replace_torch_pad(export))
            contexts.enter_context(unsupported.run_uncompiled(export.module))
            contexts.enter_context(attention.leave_out_causal_masks(export))
            contexts.enter_context(attention.zero_padding_outputs())
            contexts.enter_context(operator_translation.keep_torch_operators(export))
            contexts.enter_context(torch_modules.call_layers_whole(export))
            with _raise_refusals_alone():
                model, schema = original(**arguments)  # calls _trace
        bfloat16.correct_bfloat16_casts(model)
        for rewrite in _active_steps(_GRAPH_STEPS):
            rewrite(export, model)
        model = postprocess.apply_user_function(export, model)
    return model, schema


# wraps, because ORT reads the function's signature.
@functools.wraps(torch.onnx.export)
def _export_by_wrappers(*args: object, **kwargs: object) -> object:
    """Run step 2; a replacement for `torch.onnx.export` in ORT."""
    return tracing.wrap_restoring_cast_cache(_wrapped_export())(*args, **kwargs)


@functools.cache
def _wrapped_export() -> Trace:
    # Not a repair, because the operator is ortlaunch's own.
    export = head_loss.wrap_keeping_chunked_loss(torch.onnx.export)
    for step_name, wrap_export in _TRACE_STEPS:
        if step_name in applied_repairs():
            export = wrap_export(export)
    return export


def _active_steps(steps: tuple[tuple[str, Step], ...]) -> Iterator[Step]:
    return (step for step_name, step in steps if step_name in applied_repairs())


@contextlib.contextmanager
def _raise_refusals_alone() -> Iterator[None]:
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
def _count_export() -> Iterator[None]:
    started_at = time.perf_counter()
    yield
    tally.exports += 1
    tally.export_seconds += time.perf_counter() - started_at
