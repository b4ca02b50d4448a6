"""Repairs of ORTModule 1.19.2: gradients, changed calls, buffers, gradient checkpointing.

The module owns the list of repairs. A repair is applied only if all functions of ORT that it
replaces or relies on have the known source (source_guard.py); otherwise it is reported as not
applied. The import of ORTModule has its own repairs, in compat.py.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from ortmodule._internal.base import patching
from ortmodule._internal.base.pickling import fix_deepcopy_and_pickle
from ortmodule._internal.base.repair_registry import (
    Repair,
    apply_fitting_repairs_and_record_others_once,
)
from ortmodule._internal.base.source_guard import (
    EVALUATION,
    MANAGER,
    PROCESSED,
    SHAPES,
    TRAINING,
    TRANSITION,
    owning_class_or_module,
)
from ortmodule._internal.graph_cache import choose_graph_per_pass
from ortmodule._internal.graph_repairs.broadcasts import keep_broadcast_sizes
from ortmodule._internal.graph_repairs.frozen_weights import name_frozen_gradients
from ortmodule._internal.graph_repairs.sizes_of_one import keep_sizes_of_one
from ortmodule._internal.graph_repairs.splits import slice_partly_derived_splits
from ortmodule._internal.graph_repairs.symbolic_sizes import infer_symbolic_sizes
from ortmodule._internal.state.backward import follow_autograd_rules
from ortmodule._internal.state.buffers import keep_buffers_exact
from ortmodule._internal.state.outputs import copy_shared_outputs, restore_output_dtypes
from ortmodule._internal.torch_in_graph.torch_kernels import call_torch_kernels
from ortmodule._internal.tracing.checkpointing import call_functions_of_ort_checkpoints_directly
from ortmodule._internal.tracing.cross_entropy import skip_ignored_labels

if TYPE_CHECKING:
    from ortmodule._internal.base.ort_types import AnyFunction, Manager


def apply_repairs(*omitted_names: str) -> None:
    """Apply every repair, once in a process; tests name repairs to skip in `omitted_names`."""
    apply_fitting_repairs_and_record_others_once(REPAIRS, *omitted_names)


# ----------------------------------------------------------------------------------------- settings


def pass_device_to_ort_grad_management() -> None:
    """Pass a device to memory_efficient_grad_management.

    ORT passed the dictionary of parameters, which failed in `zeros() ... device=dict`.
    """
    patching.replace_method_by_wrapper(
        owning_class_or_module(_MANAGEMENT), _ENABLE, _enable_gradient_management_with_device
    )


_MANAGEMENT = "_mem_efficient_grad_mgmt:"
_ENABLE = "post_processing_enable_mem_efficient_training"


def _enable_gradient_management_with_device(
    original_enable: AnyFunction, model: Any, named_parameters: Any, parameters: Any
) -> object:
    return original_enable(model, named_parameters, next(iter(parameters.values())).device)


# ------------------------------------------------------------------------------------------- output


def flush_before_redirecting() -> None:
    """Flush stdout and stderr before ORT redirects them; leave streams without a descriptor alone.

    During an export ORT redirects the descriptors of both into a file. Text that was still buffered
    went into that file and was lost. Under `contextlib.redirect_stdout` the export failed.
    """
    patching.replace_method_by_wrapper(
        owning_class_or_module(_LOGGER), _REDIRECT, _flush_and_redirect_if_usable
    )


_LOGGER = "_logger:"
_REDIRECT = "_suppress_os_stream_output"


def _flush_and_redirect_if_usable(
    original_redirect: AnyFunction, enable: bool = True, on_exit: object = None
) -> object:
    are_usable = [
        _flush_stream_and_check_it_has_descriptor(stream) for stream in (sys.stdout, sys.stderr)
    ]
    return original_redirect(enable and all(are_usable), on_exit)


def _flush_stream_and_check_it_has_descriptor(output_stream: Any) -> bool:
    try:
        output_stream.flush()
        os.fstat(output_stream.fileno())
    # None, a stream in memory, a closed stream and a closed descriptor.
    except (AttributeError, OSError, ValueError):
        return False
    return True


# ---------------------------------------------------------------------------------------- session


def create_session_once() -> None:
    """Create the training session once, not twice, unless the list from the first one is used.

    ORT creates a first session to list what could be recomputed, and simplifies a formula for each
    entry. Only a memory optimization level, or a log level below WARNING, uses the list.
    """
    patching.replace_method_by_wrapper(
        owning_class_or_module(TRAINING),
        "_create_execution_agent",
        _create_agent_without_unneeded_session,
    )


def _create_agent_without_unneeded_session(
    original_create_agent: AnyFunction, manager: Manager
) -> None:
    from onnxruntime.training.ortmodule._logger import LogLevel
    from onnxruntime.training.ortmodule.options import _MemoryOptimizationLevel

    level = manager._runtime_options.memory_optimization_level
    manager._runtime_inspector.memory_ob._is_enabled = (
        level != _MemoryOptimizationLevel.USER_SPECIFIED
        or manager._debug_options.logging.log_level < LogLevel.WARNING
    )
    original_create_agent(manager)


# ---------------------------------------------------------------------------------------- the table


_CROSS_ENTROPY = "torch.nn.functional:cross_entropy"
_EXPORT = (f"{TRANSITION}._export_model", f"{TRANSITION}._get_exported_model")
_INFERENCE = tuple(
    f"{SHAPES}.{name}"
    for name in (
        "_broadcast_shapes",
        "_check_merged_dims",
        "_infer_PythonOp",
        "_onnx_infer_single_node",
    )
)
_SIZE_INFERENCE = tuple(
    f"{SHAPES}.{name}"
    for name in (
        "_infer_Slice",
        "_infer_Split_Common",
        "_infer_aten_upsample",
        "_get_int_or_float_values",
    )
)
# The order matters: if two repairs wrap one method, the later one is the outer one.
REPAIRS = (
    Repair("skip_frozen_gradients", _EXPORT),
    Repair("skip_unreached_weights", _EXPORT),
    Repair(
        "choose_graph_per_pass",
        (
            "_utils:patch_torch_module_ort_forward_method",
            f"{TRAINING}._create_autofunction_class",
            f"{TRAINING}.forward",
            f"{EVALUATION}.forward",
            f"{TRANSITION}.get_post_processed_model",
            f"{MANAGER}.__getstate__",
        ),
        choose_graph_per_pass,
    ),
    Repair(
        "follow_autograd_rules",
        (f"{TRAINING}._create_autofunction_class", f"{TRAINING}.forward"),
        follow_autograd_rules,
    ),
    Repair(
        "keep_buffers_exact",
        (
            *_EXPORT,
            f"{PROCESSED}.restore_outputs",
            f"{TRAINING}.forward",
            "_io:parse_outputs_for_onnx_export_and_extract_schema",
            "torch.nn.modules.batchnorm:_BatchNorm.forward",
        ),
        keep_buffers_exact,
    ),
    Repair(
        "refuse_weight_changes", (*_EXPORT, "_io:parse_outputs_for_onnx_export_and_extract_schema")
    ),
    Repair("restore_output_dtypes", (f"{PROCESSED}.restore_outputs",), restore_output_dtypes),
    Repair("fix_deepcopy_and_pickle", (f"{MANAGER}.__getstate__",), fix_deepcopy_and_pickle),
    Repair("follow_model_state", _EXPORT),
    Repair(
        "map_gradient_checkpointing",
        (
            *_EXPORT,
            f"{TRAINING}._create_execution_agent",
            "__init__:_override_gradient_checkpoint",
            "options:_RuntimeOptions.memory_optimizer_is_enabled",
            "torch.utils.checkpoint:checkpoint",
            "torch.utils.checkpoint:_checkpoint_without_reentrant_generator",
        ),
        call_functions_of_ort_checkpoints_directly,
    ),
    Repair(
        "pass_device_to_ort_grad_management",
        (f"{_MANAGEMENT}{_ENABLE}", f"{TRANSITION}.get_post_processed_model"),
        pass_device_to_ort_grad_management,
    ),
    Repair("flush_before_redirecting", (f"{_LOGGER}{_REDIRECT}",), flush_before_redirecting),
    Repair(
        "skip_ignored_labels",
        (
            *_EXPORT,
            f"{TRANSITION}._add_check_label_sparsity_hook",
            f"{TRANSITION}.get_post_processed_model",
            _CROSS_ENTROPY,
        ),
        skip_ignored_labels,
    ),
    Repair("export_smoothed_cross_entropy", (*_EXPORT, _CROSS_ENTROPY)),
    Repair("detect_traced_values", _EXPORT),
    Repair("detect_kept_tensors", _EXPORT),
    Repair("export_grouped_conv1d_as_conv2d", _EXPORT),
    Repair("concatenate_constants", _EXPORT),
    Repair("sum_repeated_weights", _EXPORT),
    Repair("compute_constant_outputs", _EXPORT),
    Repair(
        "keep_broadcast_sizes",
        (*_EXPORT, *_INFERENCE),
        keep_broadcast_sizes,
    ),
    Repair("keep_sizes_of_one", _EXPORT, keep_sizes_of_one),
    Repair("slice_partly_derived_splits", _EXPORT, slice_partly_derived_splits),
    Repair("infer_symbolic_sizes", _SIZE_INFERENCE, infer_symbolic_sizes),
    Repair("name_frozen_gradients", (f"{TRAINING}._build_graph",), name_frozen_gradients),
    Repair(
        "call_torch_kernels",
        (f"{TRAINING}._build_graph", f"{TRAINING}._create_execution_agent"),
        call_torch_kernels,
    ),
    # After the kernels: torch's results have memory of their own.
    Repair("copy_shared_outputs", (f"{TRAINING}._build_graph",), copy_shared_outputs),
    Repair("create_session_once", (f"{TRAINING}._create_execution_agent",), create_session_once),
    Repair("ignore_ort_export_cache", _EXPORT),
)
