"""Keep a model's buffers as in eager PyTorch: exact BatchNorm statistics, no trace of the export.

Models whose buffers cannot be exact are refused. ONNX Runtime's BatchNorm on CPU averages the
biased variance, PyTorch the unbiased one. The correction needs the number of values. The graph
returns that number as one more output, which ORTModule's schema never reads.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ortmodule._internal.base.attached import GraphInfoRecord, GraphManagerRecord, ManagerRecord
from ortmodule._internal.base.export import ExportContext, path_in_model
from ortmodule._internal.base.patching import (
    replace_attribute_temporarily,
)
from ortmodule._internal.base.repair_registry import (
    EXPORT_SOURCES,
    PROCESSED,
    TRAINING,
    repair,
)
from ortmodule._internal.base.source_guard import PACKAGE
from ortmodule._internal.errors import ORTModuleError
from ortmodule._internal.torch_in_graph import torch_modules
from ortmodule._internal.tracing import grad_mode

if TYPE_CHECKING:
    import onnx

    from ortmodule._internal.base.ort_types import AnyFunction, GraphInfo, Manager

_SIZE_PREFIX = "ortmodule_size_of_"


# ---------------------------------------------------------------------------------------------- in the export


@repair(
    "keep_buffers_exact",
    "context",
    80,
    fault="BatchNorm's running statistics include the export's batch and a biased variance (a "
    "mean of 0.4544 instead of 0.3476 after 5 steps), batches are not counted, and a BatchNorm "
    "frozen by `eval()` trains.",
    example="state/test_buffers.py::test_batch_normalization_is_eagers[trained]",
    sources={
        **EXPORT_SOURCES,
        f"{PROCESSED}.restore_outputs": "faecc5bfae8ec00d",
        f"{TRAINING}.forward": "e4a9f9b107877f89",
        "_io:parse_outputs_for_onnx_export_and_extract_schema": "c83275c7f572b599",
        "torch.nn.modules.batchnorm:_BatchNorm.forward": ("F.batch_norm(",),
    },
)
@contextlib.contextmanager
def restore_modes_and_buffers_and_record_updated_norms(
    export_context: ExportContext,
) -> Iterator[None]:
    """Restore modes and buffers after the export; changes by a pass are recorded or refused."""
    change_counts: dict[str, int] = {}
    try:
        with (
            restore_layer_modes_after_block(export_context.module),
            restore_buffers_after_block_and_count_changes(export_context.module, change_counts),
            _export_frozen_norms_as_arithmetic_if_training(export_context.training),
        ):
            yield
    except Exception:
        # The failure may come from a layer that changes a buffer; that layer may then run as torch
        # (RepeatExportWithTorchLayer).
        with contextlib.suppress(ORTModuleError):
            _updated_batch_norm_paths_or_mark_layer_for_torch_or_refuse(
                export_context, change_counts
            )
        raise
    norm_paths = _updated_batch_norm_paths_or_mark_layer_for_torch_or_refuse(
        export_context, change_counts
    )
    if export_context.training:
        export_context.facts.norm_paths = norm_paths


@repair("keep_buffers_exact", "graph pass", 10)
def refuse_frozen_norms_and_output_norm_sizes_on_cpu(
    export_context: ExportContext, exported_model: onnx.ModelProto
) -> None:
    """Add outputs to a training graph: the number of values behind each BatchNorm's statistics."""
    if not export_context.training:
        return
    _refuse_evaluation_mode_norm_nodes(exported_model)
    if export_context.device.type == "cpu":
        # On CUDA cuDNN computes the statistics, in the same way as in PyTorch.
        _add_size_output_for_each_norm(export_context, exported_model)


@repair("keep_buffers_exact", "trace wrapper", 100)
def wrap_export_to_trace_each_layer_in_its_own_mode(torch_export: AnyFunction) -> AnyFunction:
    """Return an export that keeps each layer's own mode and the current grad mode.

    ORT's training export would set every layer to training, also a BatchNorm that the user froze by
    `eval()`. Without gradients, custom autograd functions save nothing: ORT would keep the saved
    tensors until a backward pass that never comes.
    """
    modes = torch.onnx.TrainingMode

    @functools.wraps(torch_export)
    def export_preserving_modes(module: nn.Module, *args: object, **kwargs: object) -> object:
        gradients_enabled = grad_mode.starting_grad_mode_or_default(True)
        if kwargs["training"] != modes.TRAINING or (
            gradients_enabled and all(layer.training for layer in module.modules())
        ):
            return torch_export(module, *args, **kwargs)
        exporter: Any = importlib.import_module(f"{PACKAGE}._custom_autograd_function_exporter")
        # ORT's own function handles no mode besides TRAINING and EVAL.
        with replace_attribute_temporarily(
            exporter, "_get_training_mode", lambda: gradients_enabled
        ):
            return torch_export(module, *args, **{**kwargs, "training": modes.PRESERVE})

    return export_preserving_modes


@contextlib.contextmanager
def _export_frozen_norms_as_arithmetic_if_training(is_training_export: bool) -> Iterator[None]:
    """Export a BatchNorm in evaluation mode as plain arithmetic.

    In a training graph ORT would run it as if it were in training mode.
    """
    original_forward = _BatchNorm.forward

    def normalize_by_arithmetic(norm: _BatchNorm, x: torch.Tensor) -> torch.Tensor:
        if norm.training or norm.running_var is None or norm.running_mean is None:
            return original_forward(norm, x)
        shape = [1, -1, *[1] * (x.dim() - 2)]
        scale = (norm.running_var + norm.eps).rsqrt()
        y = (x - norm.running_mean.view(shape)) * scale.view(shape)
        return y * norm.weight.view(shape) + norm.bias.view(shape) if norm.affine else y

    with (
        replace_attribute_temporarily(_BatchNorm, "forward", normalize_by_arithmetic)
        if is_training_export
        else contextlib.nullcontext()
    ):
        yield


@contextlib.contextmanager
def restore_layer_modes_after_block(model: nn.Module) -> Iterator[None]:
    """Restore every layer's own mode, training or evaluation, afterwards."""
    modes = [(layer, layer.training) for layer in model.modules()]
    try:
        yield
    finally:
        for layer, mode in modes:
            layer.training = mode


class _SavedBuffer(NamedTuple):
    layer: nn.Module
    name: str
    tensor: torch.Tensor
    value_before: torch.Tensor


@contextlib.contextmanager
def restore_buffers_after_block_and_count_changes(
    model: nn.Module, filled_change_count_by_buffer: dict[str, int] | None = None
) -> Iterator[None]:
    """Restore every buffer's object and value; fill `filled_change_count_by_buffer`, at the end, with their counts.

    A count is the number of times that one pass added 1 to a single integer, as BatchNorm does; it
    is 0 for other changes.
    """
    buffer_by_name = {
        f"{path}.{name}": _SavedBuffer(layer, name, tensor, tensor.detach().clone())
        for path, layer in model.named_modules()
        for name, tensor in layer._buffers.items()
        if tensor is not None
    }
    # The export runs the model several times; counts are divided by the number of passes.
    passes: list[None] = []
    # A copy that ORT makes of the module has the hook too, and is not counted.
    hook = model.register_forward_pre_hook(
        lambda called_module, _: passes.append(None) if called_module is model else None
    )
    try:
        yield
    finally:
        hook.remove()
        if filled_change_count_by_buffer is not None:
            filled_change_count_by_buffer.update(
                _names_and_change_counts_of_changed_buffers(buffer_by_name, len(passes))
            )
        with torch.no_grad():
            for buffer in buffer_by_name.values():
                buffer.layer._buffers[buffer.name] = buffer.tensor
                buffer.tensor.copy_(buffer.value_before)


def _names_and_change_counts_of_changed_buffers(
    saved_buffer_by_name: dict[str, _SavedBuffer], pass_count: int
) -> Iterator[tuple[str, int]]:
    for name, buffer in saved_buffer_by_name.items():
        new_tensor = buffer.layer._buffers[buffer.name]
        if new_tensor is not None and _differs_in_equal_shape(buffer.value_before, new_tensor):
            # As num_batches_tracked is.
            is_counter = (
                buffer.value_before.dtype == torch.long and buffer.value_before.numel() == 1
            )
            yield (
                name,
                int(new_tensor - buffer.value_before) // max(1, pass_count) if is_counter else 0,
            )


def _differs_in_equal_shape(old_value: torch.Tensor, new_value: torch.Tensor | None) -> bool:
    """Return whether a pass changed a value.

    A value of another shape is a table that grew, which a graph does not need.
    """
    return (
        new_value is not None
        and old_value.shape == new_value.shape
        and not torch.equal(old_value, new_value)
    )


def _updated_batch_norm_paths_or_mark_layer_for_torch_or_refuse(
    export_context: ExportContext, change_count_by_buffer: dict[str, int]
) -> list[str]:
    """Return the BatchNorm layers that a pass updates, each once.

    Raises:
        ORTModuleError: a pass changes a buffer that ONNX Runtime's graph would not change.
        RepeatExportWithTorchLayer: the layer of such a buffer can run as torch.
    """
    outer_paths = torch_modules.paths_of_outermost_torch_layers_or_refuse(export_context)
    change_count_by_buffer = {
        name: count
        for name, count in change_count_by_buffer.items()
        if not torch_modules.is_inside_layers(name, outer_paths)
    }
    norm_paths = sorted({name.rpartition(".")[0] for name in change_count_by_buffer})
    for path in norm_paths:
        layer = export_context.module.get_submodule(path)
        name = path_in_model(path)
        if not isinstance(layer, _BatchNorm):
            buffers = ", ".join(
                path_in_model(buffer)
                for buffer in change_count_by_buffer
                if buffer.startswith(f"{path}.")
            )
            reason = (
                f"a forward pass changes the model's {buffers}, and ONNX Runtime's graph would not"
            )
            raise torch_modules.mark_layer_for_torch_if_auto_and_create_exception(
                export_context, path, reason
            )
        if layer.momentum is None:
            reason = (
                f"{name} is a BatchNorm with momentum=None, and ONNX Runtime's cannot average "
                "over all batches"
            )
            raise torch_modules.mark_layer_for_torch_if_auto_and_create_exception(
                export_context, path, f"{reason}; give it a momentum such as 0.1"
            )
        if change_count_by_buffer.get(f"{path}.num_batches_tracked", 1) > 1:
            reason = (
                f"{name} is a BatchNorm that runs more than once in a pass; ONNX Runtime's cannot"
            )
            raise torch_modules.mark_layer_for_torch_if_auto_and_create_exception(
                export_context, path, reason
            )
    return norm_paths


def _add_size_output_for_each_norm(
    export_context: ExportContext, exported_model: onnx.ModelProto
) -> None:
    """Add an output for each layer: the number of values behind its statistics, times its channels."""
    from onnx import TensorProto, helper

    # Input 4 of a BatchNormalization is the running variance.
    input_by_variance = {node.input[4]: node.input[0] for node in _batch_norm_nodes(exported_model)}
    for path in export_context.facts.norm_paths:
        if f"{path}.running_var" not in input_by_variance:
            reason = (
                f"{path_in_model(path)} is a BatchNorm inside a branch, or of a batch whose size follows "
                "from values and may be 0; ONNX Runtime's graph cannot update its statistics"
            )
            raise torch_modules.mark_layer_for_torch_if_auto_and_create_exception(
                export_context, path, reason
            )
        name = f"{_SIZE_PREFIX}{path}"
        exported_model.graph.node.append(
            helper.make_node("Size", [input_by_variance[f"{path}.running_var"]], [name])
        )
        exported_model.graph.output.append(
            helper.make_tensor_value_info(name, TensorProto.INT64, [])
        )


def _batch_norm_nodes(exported_model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in exported_model.graph.node if node.op_type == "BatchNormalization"]


def _refuse_evaluation_mode_norm_nodes(exported_model: onnx.ModelProto) -> None:
    """Raise ORTModuleError if a BatchNormalization node is in evaluation mode."""
    for node in _batch_norm_nodes(exported_model):
        if not any(
            attribute.name == "training_mode" and attribute.i for attribute in node.attribute
        ):
            raise ORTModuleError(
                f"{node.name} is frozen batch normalization, which ONNX Runtime would train"
            )


# ------------------------------------------------------------------------------------------------ in each pass


@repair(
    "keep_buffers_exact",
    "install",
    40,
    replaces=f"{PROCESSED}.restore_outputs",
)
def _store_all_outputs_and_restore(
    original_restore: AnyFunction, graph_info: GraphInfo, outputs: list[torch.Tensor]
) -> object:
    """Keep ORT's outputs, because the schema drops the added ones."""
    GraphInfoRecord.attached_to(graph_info).outputs = outputs
    return original_restore(graph_info, outputs)


@repair(
    "keep_buffers_exact",
    "install",
    40,
    replaces=f"{TRAINING}.forward",
)
def _run_pass_and_correct_batch_norm_statistics(
    original_forward: AnyFunction, manager: Manager, *args: object, **kwargs: object
) -> object:
    norms = _find_and_cache_tracking_batch_norm_by_path(manager)
    if not norms:
        return original_forward(manager, *args, **kwargs)
    variance_before = {path: norm.running_var.clone() for path, norm in norms.items()}
    output = original_forward(manager, *args, **kwargs)
    graph_manager = manager._graph_transition_manager
    norm_paths = GraphManagerRecord.attached_to(graph_manager).trace_facts.norm_paths
    outputs = GraphInfoRecord.attached_to(graph_manager._post_export_processed_model_info).outputs
    # Only the CPU's graph has these outputs, and they come last.
    sizes = outputs[len(outputs) - len(norm_paths) :] if manager._device.type == "cpu" else []
    with torch.no_grad():
        for path, size in zip(norm_paths, sizes):
            _unbias_batch_part_of_running_variance_in_place(
                norms[path], variance_before[path], int(size)
            )
        for path in norm_paths:
            # ORT's node does not count batches, on any device.
            norms[path].num_batches_tracked.add_(1)
    return output


def _find_and_cache_tracking_batch_norm_by_path(manager: Manager) -> dict[str, Any]:
    """Return the BatchNorm layers that have statistics, by path."""
    record = ManagerRecord.attached_to(manager)
    if record.norm_by_path is None:
        modules = manager._flattened_module.named_modules()
        record.norm_by_path = {
            path: module
            for path, module in modules
            if isinstance(module, _BatchNorm) and module.running_var is not None
        }
    return record.norm_by_path


def _unbias_batch_part_of_running_variance_in_place(
    batch_norm: Any, variance_before: torch.Tensor, normalized_element_count: int
) -> None:
    """Replace the biased variance of this batch by the unbiased one, in the running variance.

    The running variance changes from (1 - m) before + m biased to (1 - m) before + m biased n / (n
    - 1).
    """
    values_per_channel = normalized_element_count // batch_norm.running_var.numel()
    # The error has PyTorch's text.
    if values_per_channel < 2:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got {values_per_channel}"
        )
    # m times the biased variance of this batch.
    batch_share = batch_norm.running_var - (1 - batch_norm.momentum) * variance_before
    batch_norm.running_var.add_(batch_share, alpha=1 / (values_per_channel - 1))
