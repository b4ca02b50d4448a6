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

from ortmodule._internal.base import counters, custom_functions, patching, trained_names
from ortmodule._internal.base.counters import tally
from ortmodule._internal.base.export import ExportContext, export_context_from_ort_arguments
from ortmodule._internal.base.ort_types import AnyFunction
from ortmodule._internal.base.repair_registry import applied_repair_names
from ortmodule._internal.base.source_guard import TRANSITION, owning_class_or_module
from ortmodule._internal.graph_repairs import (
    bfloat16,
    broadcasts,
    constant_outputs,
    convolutions,
    copied_inputs,
    gradient_names,
    padding,
    postprocess,
)
from ortmodule._internal.state import buffers, model_state, unsupported_models, weight_changes
from ortmodule._internal.state import python_values as values
from ortmodule._internal.torch_in_graph import (
    attention,
    head_loss,
    operator_table,
    operator_translation,
    torch_modules,
)
from ortmodule._internal.tracing import (
    aliases,
    checkpointing,
    cross_entropy,
    export_wrappers,
    grad_mode,
    kept_tensors,
)

_PACKAGE_FOLDER = str(Path(__file__).parent)
Step = TypeVar("Step")
Trace = AnyFunction

# 1. Contexts of the plain pass, which gives ORT the model's outputs, and of the trace; the
# outermost first.
_CONTEXT_STEPS: tuple[tuple[str, Callable[[ExportContext], AbstractContextManager[None]]], ...] = (
    ("detect_traced_values", values.record_lines_reading_values_and_sizes_in_python),
    ("export_smoothed_cross_entropy", cross_entropy.write_out_soft_or_smoothed_cross_entropy),
    ("skip_ignored_labels", cross_entropy.drop_ignored_rows_in_training_export_if_sparse),
    ("map_gradient_checkpointing", checkpointing.call_and_record_checkpoints_directly),
    ("refuse_weight_changes", weight_changes.refuse_weight_changes_and_restore_weights),
    ("follow_model_state", model_state.record_read_state_and_refuse_untraceable),
    ("stop_gradient_under_no_grad", grad_mode.record_whether_model_reads_grad_mode),
    ("keep_buffers_exact", buffers.restore_modes_and_buffers_and_record_updated_norms),
    ("detect_kept_tensors", kept_tensors.record_escaped_tensors_and_replacements),
)
# 2. Wrappers of the trace alone, the innermost first.
_TRACE_STEPS: tuple[tuple[str, Callable[[Trace], Trace]], ...] = (
    ("export_with_torchscript", export_wrappers.wrap_export_for_torchscript),
    ("refuse_custom_backward", custom_functions.wrap_export_with_current_inlining_flag),
    ("export_exact_forms", operator_table.wrap_export_with_exact_forms_without_fast_path),
    ("keep_constants_apart", export_wrappers.wrap_export_to_clone_scalar_constants),
    ("trace_swapped_weights", export_wrappers.wrap_export_allowing_functional_call),
    # Inside the next one, which must track the tensors that this one computes.
    ("propagate_inplace_views", aliases.wrap_export_with_alias_tracking),
    ("stop_gradient_under_no_grad", grad_mode.wrap_export_with_grad_mode_tracking),
    (
        "infer_shapes_without_weights",
        export_wrappers.wrap_export_hiding_large_weights_from_inference,
    ),
    ("silence_export_warnings", export_wrappers.wrap_export_silencing_warnings),
    ("keep_buffers_exact", buffers.wrap_export_to_trace_each_layer_in_its_own_mode),
)
# 3. Passes over the exported graph.
_GRAPH_STEPS: tuple[tuple[str, Callable[[ExportContext, onnx.ModelProto], None]], ...] = (
    ("keep_buffers_exact", buffers.refuse_frozen_norms_and_output_norm_sizes_on_cpu),
    ("skip_ignored_labels", cross_entropy.change_label_gathers_to_shrunken_gathers),
    (
        "export_grouped_conv1d_as_conv2d",
        convolutions.rewrite_or_refuse_grouped_convs_for_cpu_training,
    ),
    ("keep_broadcast_sizes", broadcasts.write_export_batch_sizes_into_metadata),
    ("concatenate_constants", gradient_names.slice_repeated_constants),
    ("sum_repeated_weights", copied_inputs.copy_trained_inputs_repeated_in_one_node),
    ("export_smoothed_cross_entropy", copied_inputs.copy_loss_scores_that_no_node_computes),
    ("compute_constant_outputs", constant_outputs.make_constant_training_outputs_unfoldable),
)
# 4. Selection of the inputs and weights that get a gradient.
_GRADIENT_STEPS: tuple[
    tuple[str, Callable[[ExportContext, onnx.ModelProto, list[str]], list[str]]], ...
] = (
    ("skip_frozen_gradients", trained_names.input_names_besides_frozen_weights),
    ("skip_unreached_weights", trained_names.input_names_reached_by_gradient_or_unused),
)
# 5. Consequences of the trace: reported, stored in options, or an error.
_VERDICT_STEPS: tuple[tuple[str, Callable[[ExportContext], None]], ...] = (
    ("map_gradient_checkpointing", checkpointing.enable_ort_recomputation_if_checkpointed),
    ("skip_ignored_labels", cross_entropy.record_counted_label_fraction),
    ("detect_traced_values", values.refuse_or_note_values_read_in_python),
)


def install_export_steps_in_ort() -> None:
    """Install these steps in ORT's export, once in a process."""
    patching.replace_torch_export_for_ort(_export_by_wrapped_torch_export)
    patching.replace_method_by_wrapper(
        owning_class_or_module(TRANSITION),
        "_get_exported_model",
        _trace_until_torch_layers_are_found,
    )
    patching.replace_method_by_wrapper(
        owning_class_or_module(TRANSITION),
        "_export_model",
        _export_then_narrow_gradient_names_and_check_facts,
    )
    # Inside the next one, which exports again if an operator has no kernel.
    bfloat16.install_bfloat16_repairs_for_gpu_graphs()
    operator_translation.install_build_retries_and_readable_errors()
    unsupported_models.install_cause_messages_for_pass_errors()


def _export_then_narrow_gradient_names_and_check_facts(
    original_export_model: AnyFunction, **ort_arguments: object
) -> object:
    """Run steps 1 to 5; a replacement for ORT's `_export_model`."""
    with counters.while_building():
        model, schema, names, differentiable_names = original_export_model(
            **ort_arguments
        )  # calls _traced
        export_context = export_context_from_ort_arguments(ort_arguments)
        for narrow_names in _steps_of_applied_repairs(_GRADIENT_STEPS):
            differentiable_names = narrow_names(export_context, model, differentiable_names)
        for apply_verdict in _steps_of_applied_repairs(_VERDICT_STEPS):
            apply_verdict(export_context)
    return model, schema, names, differentiable_names


def _trace_until_torch_layers_are_found(
    original_get_exported: AnyFunction, **ort_arguments: object
) -> object:
    """Run steps 1 to 3; a replacement for ORT's `_get_exported_model`."""
    if ort_arguments["ortmodule_cache_dir"] and "ignore_ort_export_cache" in applied_repair_names():
        tally.add_end_note_once(
            "ORTMODULE_CACHE_DIR is not used: ORT would take a graph of another mode or model from "
            "it"
        )
        ort_arguments["ortmodule_cache_dir"] = ""
    export_context = export_context_from_ort_arguments(ort_arguments)
    unsupported_models.refuse_sparse_gradients_and_complex_weights(export_context.module)
    # Each retry marks one more layer to run as torch, so the loop ends with the last layer.
    while True:
        try:
            return _trace_and_rewrite_graph(export_context, original_get_exported, ort_arguments)
        except torch_modules.RepeatExportWithTorchLayer:
            continue


def _trace_and_rewrite_graph(
    export_context: ExportContext,
    original_get_exported: AnyFunction,
    ort_arguments: dict[str, object],
) -> object:
    export_context.facts.clear()
    with _count_and_time_export():
        with contextlib.ExitStack() as contexts:
            for context in _steps_of_applied_repairs(_CONTEXT_STEPS):
                contexts.enter_context(context(export_context))
            contexts.enter_context(padding.replace_torch_pad_temporarily(export_context))
            contexts.enter_context(
                unsupported_models.run_compiled_layers_uncompiled(export_context.module)
            )
            contexts.enter_context(
                attention.let_transformers_leave_out_causal_masks(export_context)
            )
            contexts.enter_context(attention.zero_padding_in_transformer_encoder_outputs())
            contexts.enter_context(
                operator_translation.keep_torch_operators_while_exporting(export_context)
            )
            contexts.enter_context(
                torch_modules.record_torch_layers_as_single_calls(export_context)
            )
            with _raise_refusals_without_ort_traceback():
                model, schema = original_get_exported(**ort_arguments)  # calls _trace
        bfloat16.correct_type_code_of_bfloat16_casts(model)
        for rewrite in _steps_of_applied_repairs(_GRAPH_STEPS):
            rewrite(export_context, model)
        model = postprocess.apply_check_and_record_user_postprocess_if_set(export_context, model)
    return model, schema


# wraps, because ORT reads the function's signature.
@functools.wraps(torch.onnx.export)
def _export_by_wrapped_torch_export(*args: object, **kwargs: object) -> object:
    """Run step 2; a replacement for `torch.onnx.export` in ORT."""
    return export_wrappers.wrap_export_restoring_autocast_cache(
        _torch_export_with_active_wrappers()
    )(*args, **kwargs)


@functools.cache
def _torch_export_with_active_wrappers() -> Trace:
    # Not a repair, because the operator is this package's own.
    export = head_loss.wrap_export_keeping_chunked_loss(torch.onnx.export)
    for step_name, wrap_export in _TRACE_STEPS:
        if step_name in applied_repair_names():
            export = wrap_export(export)
    return export


def _steps_of_applied_repairs(named_steps: tuple[tuple[str, Step], ...]) -> Iterator[Step]:
    return (step for step_name, step in named_steps if step_name in applied_repair_names())


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
